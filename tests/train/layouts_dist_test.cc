// Tests of training runs of the real program on other layouts than FSDP, and of failures in such runs.
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/support/two_hosts.h"
#include "tests/train/train_command.h"

namespace tessera::train {
namespace {

using testing::asset;
using ::testing::HasSubstr;
using testing::program;
using testing::run_process;
using testing::TempFolder;

// A tiny Llama with random weights and the tokenizer of SmolLM2.
std::filesystem::path layouts_recipe(const TempFolder& folder) {
  const auto model = folder / "tiny";
  std::filesystem::create_directories(model);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    publish_file(model / name, read_file(asset("smollm2") / name));
  }
  publish_file(model / "config.json",
               R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.1, "torch_dtype": "float32", "rms_norm_eps": 1e-05,
    "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2})");
  const auto path = folder / "recipe.yaml";
  std::ofstream(path) << fmt::format(R"(
model: {{path: {}, init: random}}
data: {{train: [{}], format: chat, sequence_length: 64}}
optimizer: {{lr: 3.0e-3, max_grad_norm: 1.0}}
schedule: {{warmup_steps: 2}}
train: {{steps: 12, global_batch_size: 12, local_batch_size: 2, validate_every: 0}}
checkpoint: {{every: 0, export: final}}
log: {{tensorboard: false}}
comm: {{backend: gloo}}
)",
                                     model.string(), asset("text/dialogues.jsonl").string());
  return path;
}

testing::ProcessResult train(const std::filesystem::path& recipe, const std::filesystem::path& dir, int ranks,
                             const std::vector<std::string>& overrides) {
  return run_process(train_command(recipe, dir, ranks, overrides));
}

std::vector<nlohmann::json> read_metrics(const std::filesystem::path& dir) {
  std::vector<nlohmann::json> steps;
  std::ifstream lines(dir / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line));
  return steps;
}

void expect_close(const std::filesystem::path& a, const std::filesystem::path& b) {
  const auto ours = read_metrics(a), theirs = read_metrics(b);
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    const double loss = theirs[i]["loss"], norm = theirs[i]["grad_norm"];
    EXPECT_NEAR(ours[i]["loss"].get<double>(), loss, 1e-5 * std::abs(loss)) << a << ", step " << i + 1;
    EXPECT_NEAR(ours[i]["grad_norm"].get<double>(), norm, 1e-5 * norm) << a << ", step " << i + 1;
  }
}

const std::vector<std::string> kReplicas = {"parallel.dp_replicate=-1", "parallel.dp_shard=1"};

std::vector<std::string> with(std::vector<std::string> overrides, const std::vector<std::string>& more) {
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

// Two hosts with two ranks each, started by `tessera launch`, are compared with one host with four ranks.
class TwoHosts : public testing::TwoHostsTest {};

TEST_F(TwoHosts, TrainAsOneHost) {
  const auto recipe = layouts_recipe(folder_);
  start([&](int number) {
    std::vector<std::string> command = {program(),
                                        "launch",
                                        "--nproc",
                                        "2",
                                        "--nnodes",
                                        "2",
                                        "--node-rank",
                                        std::to_string(number),
                                        "--master",
                                        testing::kFirstHost,
                                        "--",
                                        program(),
                                        "train",
                                        recipe.string(),
                                        "checkpoint.dir=" + (folder_ / "two").string(),
                                        "comm.backend=auto",
                                        "train.local_batch_size=1"};
    std::vector<char*> arguments;
    for (auto& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    return ::execv(arguments[0], arguments.data());
  });
  if (IsSkipped() || HasFatalFailure()) return;
  for (const auto& host : hosts_) host->go();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
  EXPECT_THAT(hosts_[0]->said(), HasSubstr("4 ranks"));
  const auto alone = train(recipe, folder_ / "one", 4, {"comm.backend=auto", "train.local_batch_size=1"});
  ASSERT_EQ(alone.exit_code, 0) << alone.err;
  expect_close(folder_ / "two", folder_ / "one");
}

TEST(Layouts, ReplicatedAndShardedRunsHaveEqualLosses) {
  TempFolder folder;
  const auto recipe = layouts_recipe(folder);
  const auto sharded = train(recipe, folder / "sharded", 2, {});
  ASSERT_EQ(sharded.exit_code, 0) << sharded.err;
  ASSERT_EQ(read_metrics(folder / "sharded").size(), 12u);
  EXPECT_LT(read_metrics(folder / "sharded").back()["loss"], read_metrics(folder / "sharded").front()["loss"]);
  for (const int ranks : {2, 3}) {
    const auto dir = folder / std::to_string(ranks);
    const auto run = train(recipe, dir, ranks, kReplicas);
    ASSERT_EQ(run.exit_code, 0) << run.err;
    expect_close(dir, folder / "sharded");
    EXPECT_TRUE(std::filesystem::exists(dir / "model" / "model.safetensors"));
  }
  const auto again = train(recipe, folder / "again", 3, kReplicas);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_TRUE(read_file(folder / "again/model/model.safetensors") == read_file(folder / "3/model/model.safetensors"));
}

TEST(Layouts, ReplicatedRunResumesBitwiseAndAsAShardedRun) {
  TempFolder folder;
  const auto recipe = layouts_recipe(folder);
  for (const bool replicas : {true, false}) {
    const auto dir = folder / (replicas ? "replicas" : "sharded");
    // The other learning rate schedules depend on the number of steps.
    const auto first =
        train(recipe, dir, 3, with(kReplicas, {"checkpoint.every=6", "schedule.name=constant", "train.steps=6"}));
    ASSERT_EQ(first.exit_code, 0) << first.err;
    const auto second = train(
        recipe, dir, 3,
        with(replicas ? kReplicas : std::vector<std::string>{}, {"checkpoint.every=6", "schedule.name=constant"}));
    ASSERT_EQ(second.exit_code, 0) << second.err;
    ASSERT_EQ(read_metrics(dir).size(), 12u);
  }
  const auto straight = train(recipe, folder / "straight", 3, with(kReplicas, {"schedule.name=constant"}));
  ASSERT_EQ(straight.exit_code, 0) << straight.err;
  EXPECT_TRUE(read_file(folder / "replicas/model/model.safetensors") ==
              read_file(folder / "straight/model/model.safetensors"));
  expect_close(folder / "sharded", folder / "straight");
}

TEST(Layouts, AFailedSaveEndsTheRunAtTheNextStep) {
  TempFolder folder;
  const auto recipe = layouts_recipe(folder);
  // No file may be longer than 100 KiB. Every rank's file of a checkpoint is longer, and so are the rows in the data
  // cache, which an earlier run therefore writes.
  ASSERT_EQ(train(recipe, folder / "rows", 2, {"train.steps=4"}).exit_code, 0);
  const auto script = fmt::format("trap '' XFSZ; ulimit -f 100; exec {} checkpoint.every=40 train.steps=4000",
                                  fmt::join(train_command(recipe, folder / "run", 2), " "));
  const auto run = run_process({"bash", "-c", script});
  EXPECT_EQ(run.exit_code, 3) << run.err;
  EXPECT_THAT(run.err, HasSubstr("[checkpoint.save]"));
  EXPECT_THAT(run.err, HasSubstr("not saved: rank "));
  const auto steps = read_metrics(folder / "run").size();
  EXPECT_GE(steps, 40u);
  EXPECT_LT(steps, 80u);  // otherwise the next save would have found the failure
  EXPECT_TRUE(std::filesystem::is_empty(folder / "run" / "checkpoints"));
}

TEST(Layouts, SamplingDuringTrainingDoesNotChangeTheModel) {
  TempFolder folder;
  const auto recipe = layouts_recipe(folder);
  const auto plain = train(recipe, folder / "plain", 2, {"train.steps=4"});
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_EQ(plain.err.find("  sample \""), std::string::npos);
  const auto sampled = train(recipe, folder / "sampled", 2, {"train.steps=4", "train.sample_every=2"});
  ASSERT_EQ(sampled.exit_code, 0) << sampled.err;
  size_t count = 0;
  for (size_t at = 0; (at = sampled.err.find("  sample \"", at)) != std::string::npos; ++at) ++count;
  EXPECT_EQ(count, 2u) << sampled.err;
  EXPECT_THAT(sampled.err, HasSubstr("step 4/4  sample \""));
  EXPECT_THAT(sampled.err, HasSubstr("assistant\\n\" -> \""));  // the prompt ends where the answer begins
  EXPECT_TRUE(read_file(folder / "plain/model/model.safetensors") ==
              read_file(folder / "sampled/model/model.safetensors"));
}

}  // namespace
}  // namespace tessera::train
