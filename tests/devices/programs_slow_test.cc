// Tests random programs of operations on DTensors of the pretend device against plain tensors of the CPU, with new
// seeds at every run.
#include "tests/conformance/programs/campaign.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

class AllProgramsOnPretendMesh : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(AllProgramsOnPretendMesh, EqualPlainTensorsOfTheCpu) {
  EXPECT_THAT(run_asked_programs(GetParam(), 1000, "pretend").wrong, ::testing::IsEmpty());
  EXPECT_THAT(pretend::take_faults(), ::testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, AllProgramsOnPretendMesh, ::testing::ValuesIn(program_meshes()),
                         [](const auto& info) { return mesh_name(info.param); });

}  // namespace
}  // namespace tessera::testing
