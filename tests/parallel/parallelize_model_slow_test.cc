// Every layout, family and kind of activation checkpoints at every remainder of the tokens by the ranks.
#include "tests/parallel/parallel_families.h"

namespace tessera::testing {
namespace {

class ParallelizeModelLengths : public ::testing::TestWithParam<int64_t> {};

TEST_P(ParallelizeModelLengths, EqualOneRankOnEveryLayoutFamilyAndCheckpointing) {
  expect_layouts_equal_one_rank(/*rows=*/4, GetParam());
  expect_layouts_equal_one_rank(/*rows=*/7, GetParam());
}

// 2 and 3 leave some of four ranks without a token.
INSTANTIATE_TEST_SUITE_P(, ParallelizeModelLengths, ::testing::Values(2, 3, 5, 6, 8, 13));

}  // namespace
}  // namespace tessera::testing
