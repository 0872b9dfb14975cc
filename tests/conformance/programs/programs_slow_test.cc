// Random programs of operations on DTensors against plain tensors, with new seeds at every run: 200,000 over the
// meshes.
#include <gtest/gtest.h>

#include "tests/conformance/programs/campaign.h"

namespace tessera::testing {
namespace {

class RandomPrograms : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(RandomPrograms, EqualPlainTensors) { EXPECT_TRUE(run_asked_programs(GetParam(), 25000).wrong.empty()); }

INSTANTIATE_TEST_SUITE_P(, RandomPrograms, ::testing::ValuesIn(program_meshes()),
                         [](const auto& info) { return mesh_name(info.param); });

}  // namespace
}  // namespace tessera::testing
