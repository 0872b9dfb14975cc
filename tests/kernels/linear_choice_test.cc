#include "tessera/kernels/detail/linear_choice.h"

#include <gtest/gtest.h>

#include "tessera/base/file.h"
#include "tests/support/temp_folder.h"

namespace tessera::detail {
namespace {

bool yes() { return true; }
bool no() { return false; }

TEST(LinearChoice, FirstMeasurementOfAMachineIsKept) {
  testing::TempFolder folder;
  const auto file = folder / "new" / "choice";
  EXPECT_TRUE(kept_choice(file, yes));
  EXPECT_EQ(read_file(file), "onednn\n");
  EXPECT_TRUE(kept_choice(file, no)) << "the kept choice counts, not a later measurement";
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "new"), {}), 1);
}

TEST(LinearChoice, UnreadableOrUnwritableChoiceIsMeasured) {
  testing::TempFolder folder;
  publish_file(folder / "broken", "neither");
  EXPECT_FALSE(kept_choice(folder / "broken", no));
  EXPECT_TRUE(kept_choice(folder / "broken" / "below a file", yes));
}

TEST(LinearChoice, OneDnnMultipliesLikeAtLinear) {
  const auto x = at::randn({33, 20}), weight = at::randn({17, 20}), bias = at::randn({17});
  EXPECT_TRUE(at::allclose(onednn_product(x, weight, bias), at::linear(x, weight, bias), 1e-5, 1e-5));
}

}  // namespace
}  // namespace tessera::detail
