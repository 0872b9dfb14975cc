// Runs the conformance tests at length: with full_tensor, on more ranks and mesh shapes, with many random placements.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/conformance/suite.h"

namespace tessera::testing {
namespace {

class OnMeshOfFour : public ::testing::TestWithParam<const char*> {};

TEST_P(OnMeshOfFour, EqualsThePlainOperationForAllPlacements) { expect_equal_on_mesh(GetParam(), 4); }

// The other groups are tested in conformance_dist_test.cc.
INSTANTIATE_TEST_SUITE_P(, OnMeshOfFour, ::testing::ValuesIn(kElementwiseGroups),
                         [](const auto& info) { return std::string(info.param); });

class ExtendedConformance : public ::testing::TestWithParam<const char*> {};

TEST_P(ExtendedConformance, EqualsThePlainOperation) {
  for (const int64_t k : {2, 3, 4}) {
    Conformance run({.mesh = {k}, .full = true});
    add_group(
        GetParam(), {2 * k + 1, 2 * k, k + 1, k, k - 1, 1, 0},
        [&](const std::shared_ptr<const Reference>& reference) { run.add_all(reference); }, /*missing_too=*/true);
    run.check();
    expect_conforming(run.report(), GetParam(), /*at_random=*/false, /*missing_too=*/true);
  }
}

TEST_P(ExtendedConformance, EqualsThePlainOperationForRandomPlacementsOnSeveralMeshDims) {
  rc::Random random(random_seed());
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{2, 2}, {2, 3}, {2, 1, 2}}) {
    Conformance run({.mesh = mesh, .full = true});
    add_group(GetParam(), {9, 5, 1},
              [&](const std::shared_ptr<const Reference>& reference) { run.add_random(reference, 12, random); });
    run.check();
    expect_conforming(run.report(), GetParam(), /*at_random=*/true);
  }
}

INSTANTIATE_TEST_SUITE_P(, ExtendedConformance, ::testing::ValuesIn(kOpGroups),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tessera::testing
