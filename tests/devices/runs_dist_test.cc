// Runs of the program on the pretend device: the CPU's losses, saved there and resumed on the CPU and back.
#include "tests/devices/pretend.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

struct Ways {
  const char* name;
  int ranks;
  std::vector<std::string> settings;
  bool experts = false;
};

class PretendRuns : public ::testing::TestWithParam<Ways> {};

TEST_P(PretendRuns, GoOnOnTheCpuAndBack) {
  const auto& wanted = GetParam();
  const TinyRun runs;
  if (wanted.experts) runs.have_experts(2);
  const auto train = [&](const std::string& dir, const std::string& device, int steps) {
    auto settings = wanted.settings;
    settings.insert(settings.end(), {"train.device=" + device, fmt::format("train.steps={}", steps),
                                     "schedule.warmup_steps=0", "checkpoint.every=1"});
    auto command = runs.command(dir, wanted.ranks, settings);
    if (device == "pretend") {
      command[0] = std::filesystem::path(command[0]).replace_filename("tessera_pretend").string();
    }
    const auto run = testing::run_process(command);
    ASSERT_EQ(run.exit_code, 0) << dir << " on " << device << "\n" << run.err;
  };
  train("here", "cpu", 3);
  int steps = 0;
  for (const char* device : {"pretend", "cpu", "pretend"}) train("back and forth", device, ++steps);
  expect_same_run(runs, "back and forth", "here");
}

INSTANTIATE_TEST_SUITE_P(, PretendRuns,
                         ::testing::Values(Ways{"Fsdp", 2, {}},
                                           Ways{"Hsdp", 4, {"parallel.dp_replicate=2", "train.local_batch_size=1"}},
                                           Ways{"Ddp", 2, {"parallel.dp_replicate=2", "parallel.dp_shard=1"}},
                                           Ways{"Tp", 2, {"parallel.tp=2"}}, Ways{"Pp", 2, {"parallel.pp=2"}},
                                           Ways{"Ep", 2, {"parallel.ep=2"}, true}, Ways{"Cp", 2, {"parallel.cp=2"}},
                                           Ways{"Lora", 2, {"model.lora.rank=2"}},
                                           Ways{"Qlora", 2, {"model.lora.rank=2", "lora.quantize=nf4"}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::train
