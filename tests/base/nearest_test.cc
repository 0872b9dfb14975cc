// The nearest word to a misspelled one, by edits and swaps.
#include "tessera/base/text/nearest.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace tessera {
namespace {

TEST(Nearest, DistanceCountsEditsAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("lr", ""), 2u);
  EXPECT_EQ(edit_distance("warmup", "warmup"), 0u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("trian", "train"), 1u);
}

TEST(Nearest, PrefersTheFirstOfEqualCandidatesAndIsEmptyWithoutCandidates) {
  constexpr std::array<std::string_view, 3> kWords{"train", "brain", "drain"};
  EXPECT_EQ(nearest("rain", kWords), "train");
  EXPECT_EQ(nearest("drian", kWords), "drain");
  EXPECT_EQ(nearest("x", {}), "");
}

TEST(Nearest, HugeWordsAreTruncated) {
  const std::string huge(1 << 20, 'a');
  EXPECT_EQ(edit_distance(huge, "a"), 63u);
}

}  // namespace
}  // namespace tessera
