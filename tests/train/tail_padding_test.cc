// Tests of the count of tokens after the last label of each row.
#include "tessera/train/nemo/tail_padding.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

TEST(TailPadding, CountsTokensAfterTheLastLabelOfEachRow) {
  const auto rows = at::tensor({5, -100, 7, -100, -100, -100, 2, 3, -100, -100, -100, 1}, at::kLong).view({3, 4});
  EXPECT_EQ(count_tail_padding(rows), 1 + 0 + 0);
  EXPECT_EQ(count_tail_padding(at::tensor({9, 0, 0, 0, 0, 0}, at::kLong).view({2, 3}), 0), 5);
  EXPECT_EQ(count_tail_padding(at::ones({2, 4}, at::kLong)), 0);
  EXPECT_EQ(count_tail_padding(at::full({2, 4}, -100, at::kLong)), 8);
  EXPECT_EQ(count_tail_padding(at::full({2, 0}, -100, at::kLong)), 0);
  EXPECT_EQ(count_tail_padding(at::full({2, 3, 2}, -100, at::kInt)), 12);
  EXPECT_THROW(count_tail_padding(at::ones({4}, at::kLong)), Error);
}

TEST(TailPadding, EqualsADirectCountOnRandomBatches) {
  at::manual_seed(0);
  for (int round = 0; round < 10; ++round) {
    const int64_t rows = at::randint(1, 5, {1}).item<int64_t>(), length = at::randint(1, 10, {1}).item<int64_t>();
    const auto labels = at::randint(0, 50, {rows, length}, at::kLong).masked_fill(at::rand({rows, length}) < 0.3, -100);
    int64_t wanted = 0;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t at = length; at-- > 0 && labels[row][at].item<int64_t>() == -100;) ++wanted;
    }
    EXPECT_EQ(count_tail_padding(labels), wanted) << labels;
  }
}

}  // namespace
}  // namespace tessera::train
