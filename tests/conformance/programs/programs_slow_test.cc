// Tests random programs of operations on DTensors against plain tensors, with new seeds at every run: 200,000 over the
// meshes.
//
// Sharpness of the programs: on mesh 2x2, the 600 programs from seed 30000000 on find each of these defects if it is
// put into the library again. The number is the seed of a program that finds the defect.
//   30000510  means of unequal shards are averaged           30000049  any() gives a sum of booleans
//   30000199  global strides are taken from a rank's shard   30000028  a shard with the conj bit does not show the bit
//   30000017  views of a gradient are not computed again
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
