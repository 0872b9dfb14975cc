// Tests runs of the program on the pretend device against the CPU's losses. The runs are saved on the pretend device,
// resumed on the CPU, and back.
#include "tests/devices/runs.h"

namespace tessera::train {
namespace {

class PretendRuns : public ::testing::TestWithParam<Ways> {};

TEST_P(PretendRuns, ResumeOnTheCpuAndBack) {
  const TinyRun runs;
  if (GetParam().experts) runs.have_experts(2);
  expect_resumes_on_the_cpu_and_back(runs, GetParam());
}

// The setting `auto` finds the pretend device.
TEST(PretendRunsWithOneDevicePerRank, ResumeOnTheCpuAndBack) {
  const TinyRun runs;
  ::setenv(pretend::kVisibleDevices, "1", 1);  // for the processes that the test starts
  expect_resumes_on_the_cpu_and_back(runs, {.name = "", .ranks = 2, .settings = {}, .device = "auto"});
  ::unsetenv(pretend::kVisibleDevices);
}

INSTANTIATE_TEST_SUITE_P(, PretendRuns,
                         ::testing::Values(Ways{"Fsdp", 2, {}}, in_half({"", 2, {}}, "FsdpHalf"),
                                           Ways{"Hsdp", 4, {"parallel.dp_replicate=2", "train.local_batch_size=1"}},
                                           Ways{"Ddp", 2, {"parallel.dp_replicate=2", "parallel.dp_shard=1"}},
                                           Ways{"Tp", 2, {"parallel.tp=2"}}, Ways{"Pp", 2, {"parallel.pp=2"}},
                                           Ways{"Ep", 2, {"parallel.ep=2"}, true}, Ways{"Cp", 2, {"parallel.cp=2"}},
                                           Ways{"Lora", 2, {"model.lora.rank=2"}},
                                           Ways{"Qlora", 2, {"model.lora.rank=2", "lora.quantize=nf4"}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::train
