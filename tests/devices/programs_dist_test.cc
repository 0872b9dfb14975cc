// Tests programs of operations on DTensors of the pretend device against plain tensors of the CPU: programs that once
// showed a defect, and a few with new seeds at every run. programs_slow_test.cc draws 8,000.
#include "tests/conformance/programs/campaign.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

using ::testing::IsEmpty;

TEST(KeptProgramsOnPretendMesh, EqualPlainTensorsOfTheCpu) {
  const auto kept = run_kept_programs("pretend");
  EXPECT_GE(kept.programs, 70);
  EXPECT_THAT(kept.wrong, IsEmpty());
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

class ProgramsOnPretendMesh : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(ProgramsOnPretendMesh, EqualPlainTensorsOfTheCpu) {
  EXPECT_THAT(run_asked_programs(GetParam(), 60, "pretend").wrong, IsEmpty());
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, ProgramsOnPretendMesh,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}),
                         [](const auto& info) { return mesh_name(info.param); });

}  // namespace
}  // namespace tessera::testing
