// Tests of the memory that adapters save: a run of SmolLM2-135M with adapters is compared with a run of all parameters.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/train/train_command.h"

namespace tessera::train {
namespace {

struct MeasuredRun {
  int64_t memory_bytes = 0;  // maximum over its steps
  double first_loss = 0, last_loss = 0;
};

MeasuredRun measured_run(const testing::TempFolder& folder, const std::string& name,
                         const std::vector<std::string>& overrides) {
  std::vector<std::string> all = {"model.path=" + testing::asset("smollm2").string(),
                                  "data.train=[" + testing::asset("text/dialogues.jsonl").string() + "]",
                                  "data.validation=[]",
                                  "train.steps=3",
                                  "train.validate_every=0",
                                  "schedule.warmup_steps=1",
                                  "checkpoint.every=0",
                                  "checkpoint.export=never",
                                  "log.tensorboard=false"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  const auto command = train_command(testing::source_folder() / "recipes/demo.yaml", folder / name, 1, all);
  const auto run = testing::run_process(command, {.timeout_seconds = 900});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  MeasuredRun out;
  std::ifstream lines(folder / name / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const auto step = nlohmann::json::parse(line);
    out.memory_bytes = std::max(out.memory_bytes, step.at("memory_bytes").get<int64_t>());
    out.last_loss = step.at("loss");
    if (out.first_loss == 0) out.first_loss = out.last_loss;
  }
  return out;
}

TEST(LoraMemory, IsAtMostHalfOfFullFineTuning) {
  const testing::TempFolder folder;
  const auto full = measured_run(folder, "full", {}), lora = measured_run(folder, "lora", {"model.lora.rank=8"});
  EXPECT_LE(2 * lora.memory_bytes, full.memory_bytes) << lora.memory_bytes << " of " << full.memory_bytes << " bytes";
  EXPECT_NEAR(lora.first_loss, full.first_loss, 1e-4 * full.first_loss) << "adapters begin as nothing";
  EXPECT_LT(lora.last_loss, 0.8 * lora.first_loss);
}

// The linears have 106 of 135 million parameters: 425 MB in float32, 55 MB in NF4.
TEST(LoraMemory, Nf4BaseSavesMostOfTheLinearWeights) {
  const testing::TempFolder folder;
  const auto lora = measured_run(folder, "lora", {"model.lora.rank=8"});
  const auto packed =
      measured_run(folder, "packed", {"model.lora.rank=8", "lora.quantize=nf4", "lora.double_quant=true"});
  EXPECT_LE(packed.memory_bytes + 300'000'000, lora.memory_bytes)
      << packed.memory_bytes << " and " << lora.memory_bytes << " bytes";
  EXPECT_NEAR(packed.first_loss, lora.first_loss, 0.1 * lora.first_loss);
  EXPECT_LT(packed.last_loss, 0.85 * packed.first_loss);
}

}  // namespace
}  // namespace tessera::train
