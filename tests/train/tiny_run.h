// Training runs of the real program that take about a second: a tiny Llama over bytes, with random weights and a few
// sentences as data.
//
//   TinyRun runs;                                                   // a folder of its own, with recipe.yaml
//   const auto run = runs.train("a", 2, {"train.steps=4"});         // checkpoint.dir is runs / "a"
//   ASSERT_EQ(run.exit_code, 0) << run.err;
//   EXPECT_EQ(runs.weights("a"), runs.weights("b"));
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/files/file.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/train/train_command.h"

namespace tessera::train {

class TinyRun {
 public:
  TinyRun() {
    const auto model = folder_ / "base";
    std::filesystem::create_directories(model);
    data::make_byte_tokenizer(model);
    write("base/config.json", R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260,
      "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "torch_dtype": "float32",
      "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "bos_token_id": 258, "eos_token_id": 258})");
    std::string lines;
    for (int line = 0; line < 60; ++line) {
      lines += nlohmann::json({{"text", fmt::format("{} times {} is {}, and {} more is {}.", line, line % 7,
                                                    line * (line % 7), line % 5, line * (line % 7) + line % 5)}})
                   .dump() +
               "\n";
      if (line == 11) write("held-out.jsonl", lines);
    }
    write("train.jsonl", lines);
    write("recipe.yaml", fmt::format(R"(
model: {{path: {0}/base, init: random}}
data: {{train: [{0}/train.jsonl], format: jsonl, sequence_length: 48}}
optimizer: {{lr: 3.0e-3, max_grad_norm: 1.0}}
schedule: {{name: constant, warmup_steps: 2}}
train: {{steps: 6, global_batch_size: 12, local_batch_size: 2, validate_every: 0}}
checkpoint: {{every: 2, keep_last: 2, export: final}}
log: {{tensorboard: false}}
)",
                                     folder_.path().string()));
  }

  // Makes the base a Qwen3-MoE of four experts. `more` has further keys of its config.
  void have_experts(int layers, const nlohmann::json& more = nlohmann::json::object()) const {
    auto config = nlohmann::json::parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
      "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4,
      "num_experts_per_tok": 2, "norm_topk_prob": true, "num_attention_heads": 4, "num_key_value_heads": 2,
      "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.1, "torch_dtype": "float32",
      "rms_norm_eps": 1e-05, "bos_token_id": 258, "eos_token_id": 258})");
    config["num_hidden_layers"] = layers;
    config.update(more);
    write("base/config.json", config.dump());
  }

  std::filesystem::path operator/(const std::filesystem::path& name) const { return folder_ / name; }
  void write(const std::string& name, const std::string& content) const {
    std::ofstream(folder_ / name, std::ios::binary) << content;
  }
  std::vector<std::string> command(const std::string& dir, int ranks, const std::vector<std::string>& more = {}) const {
    return train_command(folder_ / "recipe.yaml", folder_ / dir, ranks, more);
  }
  testing::ProcessResult train(const std::string& dir, int ranks, const std::vector<std::string>& more = {}) const {
    return testing::run_process(command(dir, ranks, more));
  }
  std::string weights(const std::string& dir) const { return read_file(folder_ / dir / "model" / "model.safetensors"); }
  std::string latest(const std::string& dir) const { return read_file(folder_ / dir / "checkpoints" / "LATEST"); }
  // The lines of metrics.jsonl that have `field`.
  std::vector<nlohmann::json> metrics(const std::string& dir, const std::string& field = "loss") const {
    std::vector<nlohmann::json> found;
    std::ifstream lines(folder_ / dir / "metrics.jsonl");
    for (std::string line; std::getline(lines, line);) {
      auto json = nlohmann::json::parse(line);
      if (json.contains(field)) found.push_back(std::move(json));
    }
    return found;
  }

 private:
  testing::TempFolder folder_;
};

// Expects that two runs have equal losses and gradient norms in every step, up to the order of sums.
inline void expect_same_run(const TinyRun& runs, const std::string& found, const std::string& wanted,
                            double tolerance = 1e-5) {
  const auto ours = runs.metrics(found), theirs = runs.metrics(wanted);
  ASSERT_EQ(ours.size(), theirs.size()) << found;
  for (size_t i = 0; i < ours.size(); ++i) {
    const double loss = theirs[i]["loss"], norm = theirs[i]["grad_norm"];
    EXPECT_NEAR(ours[i]["loss"].get<double>(), loss, tolerance * std::abs(loss)) << found << ", step " << i + 1;
    EXPECT_NEAR(ours[i]["grad_norm"].get<double>(), norm, tolerance * norm) << found << ", step " << i + 1;
    EXPECT_TRUE(ours[i].at("tokens") == theirs[i].at("tokens")) << found << ": each token counts once";
  }
}

}  // namespace tessera::train
