// Tests every operation of ops.txt on DTensors against the plain operation. Results and gradients are compared for all
// placements of the tensors on meshes of 2 and 4 (elementwise operations: 2) with 0, 1, k - 1, k + 1 and 2k + 1 rows.
// Strided shards and uncommon Partials are tried for these sizes, too. On a mesh of 2 x 2 the placements are random.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "tests/conformance/suite.h"

namespace tessera::testing {
namespace {

TEST(Conformance, EveryListedOperationHasSamplesAndAKnownGroup) {
  EXPECT_THAT(op_groups(), ::testing::UnorderedElementsAreArray(kOpGroups));
  EXPECT_EQ(listed_ops().size(), 1130U);
  for (const auto& op : listed_ops()) {
    EXPECT_FALSE(sample_table().samples(op.name, 9, 6).empty())
        << op.name << " has no sample: see tests/conformance/samples.h";
  }
}

TEST(Conformance, MissingOpsAreListedOperations) {
  std::vector<std::string> names;
  for (const auto& op : listed_ops()) names.push_back(op.name);
  for (const auto& name : missing_ops()) EXPECT_THAT(names, ::testing::Contains(name));
}

class OnMesh : public ::testing::TestWithParam<std::tuple<const char*, int64_t>> {};

TEST_P(OnMesh, EqualsThePlainOperationForAllPlacements) {
  const auto& [group, k] = GetParam();
  expect_equal_on_mesh(group, k);
}

// Elementwise operations share few rules and take most of the time, so their mesh of 4 is in conformance_slow_test.cc.
std::vector<std::tuple<const char*, int64_t>> groups_and_ranks() {
  std::vector<std::tuple<const char*, int64_t>> out;
  for (const char* group : kOpGroups) {
    out.emplace_back(group, 2);
    const auto is_group = [&](std::string_view each) { return each == group; };
    if (std::ranges::none_of(kElementwiseGroups, is_group)) out.emplace_back(group, 4);
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(, OnMesh, ::testing::ValuesIn(groups_and_ranks()), [](const auto& info) {
  return fmt::format("{}{}", std::get<0>(info.param), std::get<1>(info.param));
});

class OnTwoMeshDims : public ::testing::TestWithParam<const char*> {};

TEST_P(OnTwoMeshDims, EqualsThePlainOperationForRandomPlacements) {
  constexpr unsigned kSeed = 20261121;
  const unsigned seed = random_seed(kSeed);  // the slow tests draw a new seed each time
  rc::Random random(seed);
  Conformance run({.mesh = {2, 2}});
  add_group(GetParam(), {5},
            [&](const std::shared_ptr<const Reference>& reference) { run.add_random(reference, 3, random); });
  run.check();
  expect_conforming(run.report(), GetParam(), /*at_random=*/true);
  if (seed == kSeed) expect_counts(run.report(), fmt::format("{}@2x2", GetParam()));
}

INSTANTIATE_TEST_SUITE_P(, OnTwoMeshDims, ::testing::ValuesIn(kOpGroups),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tessera::testing
