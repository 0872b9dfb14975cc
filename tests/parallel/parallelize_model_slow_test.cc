// Slow tests of parallelize_model: every layout, family and kind of activation checkpointing, with token counts of
// every remainder by the number of ranks. The results are compared with one rank.
#include "tests/parallel/parallel_families.h"

namespace tessera::testing {
namespace {

class ParallelizeModelLengths : public ::testing::TestWithParam<int64_t> {};

TEST_P(ParallelizeModelLengths, EqualOneRankOnEveryLayoutFamilyAndCheckpointing) {
  expect_layouts_equal_one_rank(/*rows=*/4, GetParam());
  expect_layouts_equal_one_rank(/*rows=*/7, GetParam());
}

// With 2 and 3 tokens some of four ranks have no token.
INSTANTIATE_TEST_SUITE_P(, ParallelizeModelLengths, ::testing::Values(2, 3, 5, 6, 8, 13));

}  // namespace
}  // namespace tessera::testing
