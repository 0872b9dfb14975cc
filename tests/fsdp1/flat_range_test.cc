// Tests ranges of flat parameters: chunks against torch.chunk, boxes as ranges, coverage and intersections.
#include "tessera/fsdp1/state/flat_range.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

using Ranges = std::vector<FlatRange>;

TEST(FlatRange, ChunkRangesMatchTorchChunk) {
  EXPECT_EQ(chunk_ranges({5, 3}, 2), (Ranges{{0, 9}, {9, 15}}));
  EXPECT_EQ(chunk_ranges({5, 3}, 4), (Ranges{{0, 6}, {6, 12}, {12, 15}, {}}));
  EXPECT_EQ(chunk_ranges({1, 5}, 2), (Ranges{{0, 5}, {}}));
  EXPECT_EQ(chunk_ranges({0, 5}, 2), (Ranges{{}, {}}));
  EXPECT_EQ(chunk_ranges({4, 0}, 2), (Ranges{{}, {}}));
  EXPECT_THROW(chunk_ranges({}, 2), Error);
}

TEST(FlatRange, OnlyContiguousBoxesAreRanges) {
  EXPECT_EQ(range_of_box({4, 3}, {1, 0}, {2, 3}), (FlatRange{3, 9}));
  EXPECT_EQ(range_of_box({4, 3}, {2, 1}, {1, 2}), (FlatRange{7, 9}));
  EXPECT_EQ(range_of_box({4, 3}, {1, 1}, {2, 2}), std::nullopt);
  EXPECT_EQ(range_of_box({2, 3, 4}, {1, 1, 0}, {1, 2, 4}), (FlatRange{16, 24}));
  EXPECT_EQ(range_of_box({2, 3, 4}, {0, 1, 0}, {2, 2, 4}), std::nullopt);
  EXPECT_EQ(range_of_box({4, 3}, {4, 0}, {0, 3}), (FlatRange{}));
  EXPECT_EQ(range_of_box({}, {}, {}), (FlatRange{0, 1}));
}

TEST(FlatRange, CoversOnceDetectsGapsOverlapsAndMissingEnds) {
  EXPECT_TRUE(covers_once({{3, 5}, {}, {0, 3}}, 5));
  EXPECT_TRUE(covers_once({{}, {}}, 0));
  EXPECT_FALSE(covers_once({{0, 3}, {4, 5}}, 5));
  EXPECT_FALSE(covers_once({{0, 3}, {2, 5}}, 5));
  EXPECT_FALSE(covers_once({{0, 3}}, 5));
}

TEST(FlatRange, KeepFirstHoldersDropsReplicas) {
  EXPECT_EQ(keep_first_holders({{0, 3}, {3, 5}, {0, 3}, {3, 5}}), (Ranges{{0, 3}, {3, 5}, {}, {}}));
}

TEST(FlatRange, IntersectionOfDisjointRangesIsEmpty) {
  EXPECT_EQ(intersection({0, 4}, {2, 9}), (FlatRange{2, 4}));
  EXPECT_EQ(intersection({0, 4}, {4, 9}), (FlatRange{}));
}

}  // namespace
}  // namespace tessera
