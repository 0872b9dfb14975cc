// Random programs of operations on DTensors against plain tensors, with new seeds at every run: 200,000 over the
// meshes.
//
// How sharp they are: on mesh 2x2, 600 programs from seed 30000000 on show each of these when it is put in again,
//   30000510  means of unequal parts are averaged            30000049  any() gives a sum of booleans
//   30000199  global strides are taken from a rank's part    30000028  a conjugated part is not said to be one
//   30000017  views are not taken again of a gradient
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
