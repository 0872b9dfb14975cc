// Tests of the files that a run writes about itself: recipe, metrics and events.
#include "tessera/train/output/run_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/warning_log.h"
#include "tessera/models/config/config.h"
#include "tessera/train/output/run_folder.h"
#include "tessera/train/profile/machine_peak.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/step/step.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 100;
  config.hidden_size = 8;
  config.intermediate_size = 16;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.head_dim = 4;
  return config;
}

Recipe recipe_with(const std::vector<std::string>& overrides) {
  return parse_recipe("model: {path: m}\ndata: {train: a.txt}\n", "my.yaml", overrides);
}

StepResult result_of(double loss, int64_t tokens) {
  StepResult result;
  result.loss = loss;
  result.tokens = tokens;
  return result;
}

TEST(RunReport, WritesRecipeMetricsAndEvents) {
  testing::TempFolder temp;
  RunFolder folder(temp / "run");
  const auto recipe = recipe_with({"data.sequence_length=32"});
  {
    const auto warnings = std::make_shared<WarningLog>();
    log_warning("[test] told before {}", "the report");
    RunReport report(recipe, folder, small_config(),
                     {.ranks = 2, .layout = "tp 2", .total_steps = 2, .parameters = 7, .warnings = warnings});
    auto result = result_of(3.5, 1000);
    result.communication_seconds = {0.125, 0.25};
    report.step({.step = 1, .lr = 1e-3, .seconds = 0.5, .data_seconds = 0.0625, .checkpoint_seconds = 2}, result);
    report.validation(1, 3.25, 0.125);
    log_warning("[test] told later");
    report.sample(1, "Once", "upon \"a\" time\n");
    report.finish(1, "done");
  }
  EXPECT_EQ(read_recipe(temp / "run" / "recipe.yaml").data.sequence_length, 32);
  std::ifstream metrics(temp / "run" / "metrics.jsonl");
  std::string line;
  ASSERT_TRUE(std::getline(metrics, line));
  const auto step = nlohmann::json::parse(line);
  EXPECT_EQ(step["loss"], 3.5);
  EXPECT_EQ(step["tokens_per_second"], 2000);
  EXPECT_DOUBLE_EQ(step["peak_share"], flops_per_token(small_config(), 32) * 2000 / (2 * matmul_peak(c10::kFloat)));
  EXPECT_EQ(
      step["parts"],
      nlohmann::json(
          {{"compute", 0.25}, {"communication", 0.125}, {"wait", 0.0625}, {"data", 0.0625}, {"checkpoint", 2.0}}));
  EXPECT_EQ(step["communication_by_rank"], nlohmann::json({0.125, 0.25}));
  ASSERT_TRUE(std::getline(metrics, line));
  EXPECT_EQ(nlohmann::json::parse(line)["validation_loss"], 3.25);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(temp / "run" / "tensorboard"), {}), 1);
  std::vector<nlohmann::json> events;
  for (std::ifstream file(temp / "run" / "events.jsonl"); std::getline(file, line);) {
    events.push_back(nlohmann::json::parse(line));
  }
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events[0]["step"], 0);
  EXPECT_EQ(events[0]["session"]["ranks"], 2);
  EXPECT_EQ(events[0]["session"]["layout"], "tp 2");
  EXPECT_EQ(events[0]["session"]["parameters"], 7);
  EXPECT_EQ(events[1], nlohmann::json({{"step", 0}, {"warning", "[test] told before the report"}}));
  EXPECT_EQ(events[2]["sample"], nlohmann::json({{"prompt", "Once"}, {"text", "upon \"a\" time\n"}}));
  EXPECT_EQ(events[3], nlohmann::json({{"step", 1}, {"warning", "[test] told later"}}));
  EXPECT_EQ(events[4], nlohmann::json({{"step", 1}, {"end", "done"}}));
}

TEST(RunReport, DisabledOutputsAreNotWritten) {
  testing::TempFolder temp;
  RunFolder folder(temp / "run");
  RunReport report(recipe_with({"log.tensorboard=false", "log.jsonl=false"}), folder, small_config(),
                   {.total_steps = 1});
  report.step({.step = 1, .lr = 1e-3, .seconds = 0.5}, result_of(3.5, 10));
  report.validation(1, 3.25, 0.125);
  report.finish(1, "done");
  EXPECT_FALSE(std::filesystem::exists(temp / "run" / "metrics.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(temp / "run" / "events.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(temp / "run" / "tensorboard"));
}

}  // namespace
}  // namespace tessera::train
