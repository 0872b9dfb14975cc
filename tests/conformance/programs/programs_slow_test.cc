// Random programs of operations on DTensors against plain tensors, with new seeds at every run: 25,000 on each mesh, or
// TESSERA_PROGRAMS of them. TESSERA_SEED=N draws those of N again.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>

#include "tests/conformance/programs/campaign.h"

namespace tessera::testing {
namespace {

class RandomPrograms : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(RandomPrograms, EqualPlainTensors) {
  const char* given = std::getenv("TESSERA_SEED");
  const uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::cout << "seed " << seed << " (TESSERA_SEED=" << seed << " draws the same again)\n";
  const char* count = std::getenv("TESSERA_PROGRAMS");
  const Findings found = run_programs(GetParam(), seed, count != nullptr ? std::stoll(count) : 25000);
  std::cout << found.log();
  EXPECT_TRUE(found.wrong.empty());
}

INSTANTIATE_TEST_SUITE_P(, RandomPrograms,
                         ::testing::ValuesIn(std::vector<std::vector<int64_t>>{
                             {2}, {3}, {4}, {8}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 2}}),
                         [](const auto& info) { return mesh_name(info.param); });

}  // namespace
}  // namespace tessera::testing
