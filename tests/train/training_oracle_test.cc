// Tests of a whole training run against plain PyTorch, and against the same run on other layouts.
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tessera/data/loader/loader.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/train/run/run_setup.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/train/train_command.h"

namespace tessera::train {
namespace {

using testing::asset;
using testing::run_process;
using testing::run_python;
using testing::TempFolder;

struct RunOptions {
  std::filesystem::path model;
  int64_t steps = 20;
  int64_t global_batch_size = 12;
  int64_t sequence_length = 96;
  double lr = 1e-3;
};

std::filesystem::path write_recipe(const TempFolder& folder, const RunOptions& options) {
  const auto path = folder / "recipe.yaml";
  std::ofstream(path) << fmt::format(R"(
model: {{path: {}}}
data: {{train: [{}], format: chat, sequence_length: {}}}
optimizer: {{lr: {}, weight_decay: 0.1, max_grad_norm: 1.0}}
schedule: {{name: cosine, warmup_steps: 2}}
train: {{steps: {}, global_batch_size: {}, local_batch_size: 1, validate_every: 0}}
checkpoint: {{every: 0, export: final}}
log: {{tensorboard: false}}
)",
                                     options.model.string(), asset("text/dialogues.jsonl").string(),
                                     options.sequence_length, options.lr, options.steps, options.global_batch_size);
  return path;
}

std::filesystem::path tiny_model(const TempFolder& folder) {
  const auto run =
      run_python("tests/train/oracle/tiny_llama.py", {(folder / "tiny").string(), asset("smollm2").string()});
  if (run.exit_code != 0) throw std::runtime_error(run.err);
  return folder / "tiny";
}

struct StepNumbers {
  double loss, grad_norm, lr = 0;
};

std::vector<StepNumbers> read_steps(std::istream& lines) {
  std::vector<StepNumbers> steps;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("loss")) steps.push_back({json["loss"], json["grad_norm"], json.value("lr", 0.0)});
  }
  return steps;
}

std::vector<StepNumbers> run_tessera(const std::filesystem::path& recipe, const std::filesystem::path& dir, int ranks,
                                     const std::vector<std::string>& overrides = {}) {
  const auto run = run_process(train_command(recipe, dir, ranks, overrides), {.timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  std::ifstream lines(dir / "metrics.jsonl");
  return read_steps(lines);
}

// Trains with plain PyTorch on the batches of every layout, which the same loader makes.
std::vector<StepNumbers> run_pytorch(const TempFolder& folder, const std::filesystem::path& recipe_path,
                                     const std::vector<StepNumbers>& ours,
                                     const std::vector<std::string>& checkpoint = {}) {
  const auto recipe = read_recipe(recipe_path);
  const auto run = load_run_data(recipe);
  data::DataLoader loader(run.train, static_cast<uint64_t>(recipe.train.seed), true);
  std::vector<at::Tensor> tokens, labels, positions, documents;
  for (size_t step = 0; step < ours.size(); ++step) {
    const auto batch = loader.next_global_slice(recipe.train.global_batch_size, 0, recipe.train.global_batch_size);
    tokens.push_back(batch.tokens);
    labels.push_back(batch.labels);
    positions.push_back(batch.positions);
    documents.push_back(batch.document_ids);
  }
  const std::vector<std::pair<std::string, at::Tensor>> tensors = {{"tokens", at::stack(tokens)},
                                                                   {"labels", at::stack(labels)},
                                                                   {"positions", at::stack(positions)},
                                                                   {"document_ids", at::stack(documents)}};
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SafetensorsWriter writer(folder / "batches.safetensors", specs);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.finish();
  nlohmann::json options = {{"betas", recipe.optimizer.betas},
                            {"eps", recipe.optimizer.eps},
                            {"weight_decay", recipe.optimizer.weight_decay},
                            {"max_grad_norm", recipe.optimizer.max_grad_norm}};
  for (const auto& step : ours) options["lr"].push_back(step.lr);
  publish_file(folder / "options.json", options.dump());
  std::vector<std::string> arguments = {recipe.model.path, (folder / "batches.safetensors").string(),
                                        (folder / "options.json").string()};
  arguments.insert(arguments.end(), checkpoint.begin(), checkpoint.end());
  const auto python = run_python("tests/train/oracle/plain_training.py", arguments, {.timeout_seconds = 400});
  EXPECT_EQ(python.exit_code, 0) << python.err;
  std::istringstream lines(python.out);
  return read_steps(lines);
}

void expect_close(const std::vector<StepNumbers>& a, const std::vector<StepNumbers>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i].loss, b[i].loss, 1e-5 * std::abs(b[i].loss)) << what << ", step " << i + 1;
    EXPECT_NEAR(a[i].grad_norm, b[i].grad_norm, 1e-4 * std::abs(b[i].grad_norm)) << what << ", step " << i + 1;
  }
}

TEST(Training, TwentyStepsOfATinyLlamaAgreeOnOneToFourRanksAndWithPyTorch) {
  TempFolder folder;
  const auto recipe = write_recipe(folder, {.model = tiny_model(folder)});
  const auto one = run_tessera(recipe, folder / "one", 1);
  ASSERT_EQ(one.size(), 20u);
  EXPECT_LT(one.back().loss, one.front().loss);
  expect_close(one, run_pytorch(folder, recipe, one), "1 rank against PyTorch");
  for (const int ranks : {2, 3, 4}) {
    expect_close(run_tessera(recipe, folder / std::to_string(ranks), ranks), one,
                 std::to_string(ranks) + " ranks against 1");
  }
}

TEST(Training, PyTorchResumesFromACheckpoint) {
  TempFolder folder;
  const auto recipe = write_recipe(folder, {.model = tiny_model(folder), .steps = 8});
  const auto ours = run_tessera(recipe, folder / "run", 3, {"checkpoint.every=4", "checkpoint.keep_last=9"});
  ASSERT_EQ(ours.size(), 8u);
  const auto checkpoint = folder / "run/checkpoints/step-00000004";
  const auto theirs = run_pytorch(folder, recipe, ours, {checkpoint.string(), "4"});
  expect_close(theirs, {ours.begin() + 4, ours.end()}, "PyTorch from step 5 on");
}

TEST(Training, TwoStepsOfSmolLM2AgreeOnTwoRanksAndWithPyTorch) {
  TempFolder folder;
  const auto recipe = write_recipe(
      folder, {.model = asset("smollm2"), .steps = 2, .global_batch_size = 2, .sequence_length = 128, .lr = 2e-5});
  const auto two = run_tessera(recipe, folder / "two", 2, {"schedule.warmup_steps=0"});
  ASSERT_EQ(two.size(), 2u);
  expect_close(two, run_pytorch(folder, recipe, two), "2 ranks against PyTorch");
  expect_close(run_tessera(recipe, folder / "one", 1, {"schedule.warmup_steps=0"}), two, "1 rank against 2");
}

TEST(Training, RepeatedAndInterruptedRunsAreBitwiseEqual) {
  TempFolder folder;
  const auto recipe = write_recipe(folder, {.model = tiny_model(folder), .steps = 30, .global_batch_size = 4});
  const auto first = run_tessera(recipe, folder / "first", 2);
  const auto second = run_tessera(recipe, folder / "second", 2);
  const auto weights = [&](const char* run) { return read_file(folder / run / "model" / "model.safetensors"); };
  ASSERT_EQ(first.size(), 30u);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].loss, second[i].loss) << "step " << i + 1;
    EXPECT_EQ(first[i].grad_norm, second[i].grad_norm) << "step " << i + 1;
  }
  EXPECT_TRUE(weights("first") == weights("second"));

  // A run that is asked to stop after some steps saves, exits with 0, and resumes at the same step.
  const auto dir = (folder / "third").string();
  const auto script = fmt::format(
      "{} checkpoint.every=100 & pid=$!; "
      "while [ $(cat {}/metrics.jsonl 2>/dev/null | wc -l) -lt 3 ]; do sleep 0.05; done; kill -TERM $pid; wait $pid",
      fmt::join(train_command(recipe, dir, 2), " "), dir);
  const auto interrupted = run_process({"bash", "-c", script}, {.timeout_seconds = 100});
  ASSERT_EQ(interrupted.exit_code, 0) << interrupted.err;
  ASSERT_FALSE(std::filesystem::exists(folder / "third" / "model")) << "the run ended before it was interrupted";
  const auto resumed = run_tessera(recipe, dir, 2, {"checkpoint.every=100"});
  ASSERT_EQ(resumed.size(), 30u);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].loss, resumed[i].loss) << "step " << i + 1;
  EXPECT_TRUE(weights("first") == weights("third"));
}

}  // namespace
}  // namespace tessera::train
