// Runs of the program, on the pretend device and on the CPU in turn.
#pragma once

#include <string>
#include <vector>

#include "tests/devices/pretend.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {

struct Ways {
  const char* name;
  int ranks;
  std::vector<std::string> settings;
  bool experts = false;
  double tolerance = 1e-5;  // relative, of losses and gradient norms
  const char* device = "pretend";
};

inline const std::vector<std::string> kHalfSettings = {"model.dtype=bfloat16", "precision.param=bfloat16"};

inline Ways in_half(Ways ways, const char* name) {
  ways.settings.insert(ways.settings.end(), kHalfSettings.begin(), kHalfSettings.end());
  return {name, ways.ranks, ways.settings, ways.experts, 1e-2};
}

// Each run takes one step on one device and is resumed on the other device. The losses must be those of three steps on
// the CPU.
inline void expect_resumes_on_the_cpu_and_back(const TinyRun& runs, const Ways& wanted) {
  const auto train = [&](const std::string& dir, const std::string& device, int steps) {
    auto settings = wanted.settings;
    settings.insert(settings.end(), {"train.device=" + device, fmt::format("train.steps={}", steps),
                                     "schedule.warmup_steps=0", "checkpoint.every=1"});
    auto command = runs.command(dir, wanted.ranks, settings);
    if (device != "cpu") command[0] = testing::pretend_program();
    const auto run = testing::run_process(command);
    ASSERT_EQ(run.exit_code, 0) << dir << " on " << device << "\n" << run.err;
    EXPECT_EQ(run.err.find("[train.device] pretend:0") != std::string::npos, device != "cpu") << run.err;
  };
  train("here", "cpu", 3);
  int steps = 0;
  for (const char* device : {wanted.device, "cpu", wanted.device}) train("back and forth", device, ++steps);
  expect_same_run(runs, "back and forth", "here", wanted.tolerance);
}

}  // namespace tessera::train
