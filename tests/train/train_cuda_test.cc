// Tests that the program trains on GPUs as on the CPU, and that two runs with train.deterministic have equal bits.
#include <gtest/gtest.h>

#include "tessera/comm/backends/device_backends.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

TEST(TrainCuda, LossesEqualTheCpuAndRunsResumeOnTheCpu) {
  const int gpus = comm::visible_devices(c10::DeviceType::CUDA);
  if (gpus == 0) GTEST_SKIP() << "this process sees no GPU";
  const TinyRun runs;
  ASSERT_EQ(runs.train("cpu", 1, {"train.device=cpu"}).exit_code, 0);
  for (const int ranks : {1, 2}) {
    if (ranks > gpus) continue;
    const auto name = "cuda" + std::to_string(ranks);
    const auto run = runs.train(name, ranks, {"train.device=cuda"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    expect_same_run(runs, name, "cpu", 1e-4);
    const auto careful = runs.train(name + "_skip", ranks, {"train.device=cuda", "train.on_nonfinite=skip"});
    ASSERT_EQ(careful.exit_code, 0) << careful.err;
    expect_same_run(runs, name + "_skip", "cpu", 1e-4);
    const auto further = runs.train(name, 1, {"train.device=cpu", "train.steps=8"});
    ASSERT_EQ(further.exit_code, 0) << further.err;
    EXPECT_EQ(runs.metrics(name).size(), 8U) << "what was saved there goes on here";
  }
}

TEST(TrainCuda, DeterministicRunsGiveTheSameBits) {
  const int gpus = comm::visible_devices(c10::DeviceType::CUDA);
  if (gpus == 0) GTEST_SKIP() << "this process sees no GPU";
  const TinyRun runs;
  for (const char* name : {"a", "b"}) {
    const auto run = runs.train(name, std::min(gpus, 2), {"train.device=cuda", "train.deterministic=true"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }
  EXPECT_TRUE(runs.weights("a") == runs.weights("b"));
}

}  // namespace
}  // namespace tessera::train
