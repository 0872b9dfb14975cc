#include "tessera/train/run_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/file.h"
#include "tessera/models/config.h"
#include "tessera/train/machine_peak.h"
#include "tessera/train/recipe.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/step.h"
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
    RunReport report(recipe, folder, small_config(), 2, 0, 2);
    report.step(1, result_of(3.5, 1000), 1e-3, 0.5);
    report.validation(1, 3.25, 0.125);
    report.finish("done");
  }
  EXPECT_EQ(read_recipe(temp / "run" / "recipe.yaml").data.sequence_length, 32);
  std::ifstream metrics(temp / "run" / "metrics.jsonl");
  std::string line;
  ASSERT_TRUE(std::getline(metrics, line));
  const auto step = nlohmann::json::parse(line);
  EXPECT_EQ(step["loss"], 3.5);
  EXPECT_EQ(step["tokens_per_second"], 2000);
  EXPECT_DOUBLE_EQ(step["peak_share"], flops_per_token(small_config(), 32) * 2000 / (2 * matmul_peak(c10::kFloat)));
  ASSERT_TRUE(std::getline(metrics, line));
  EXPECT_EQ(nlohmann::json::parse(line)["validation_loss"], 3.25);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(temp / "run" / "tensorboard"), {}), 1);
}

TEST(RunReport, WhatTheRecipeSwitchesOffIsNotWritten) {
  testing::TempFolder temp;
  RunFolder folder(temp / "run");
  RunReport report(recipe_with({"log.tensorboard=false", "log.jsonl=false"}), folder, small_config(), 1, 0, 1);
  report.step(1, result_of(3.5, 10), 1e-3, 0.5);
  report.validation(1, 3.25, 0.125);
  report.finish("done");
  EXPECT_FALSE(std::filesystem::exists(temp / "run" / "metrics.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(temp / "run" / "tensorboard"));
}

}  // namespace
}  // namespace tessera::train
