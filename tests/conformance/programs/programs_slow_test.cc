// Random programs at length: 25,000 on each mesh, with new seeds at every run.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>

#include "tests/conformance/programs/campaign.h"

namespace tessera::testing {
namespace {

class ManyRandomPrograms : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(ManyRandomPrograms, EqualPlainTensors) {
  const char* given = std::getenv("TESSERA_SEED");
  const uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::cout << "seed " << seed << " (TESSERA_SEED=" << seed << " draws the same again)\n";
  const Findings found = run_programs(GetParam(), seed, 25000);
  std::cout << found.log();
  EXPECT_TRUE(found.wrong.empty());
}

INSTANTIATE_TEST_SUITE_P(, ManyRandomPrograms,
                         ::testing::ValuesIn(std::vector<std::vector<int64_t>>{
                             {2}, {3}, {4}, {8}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 2}}),
                         [](const auto& info) { return mesh_name(info.param); });

}  // namespace
}  // namespace tessera::testing
