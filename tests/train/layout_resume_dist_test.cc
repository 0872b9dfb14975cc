// Tests of runs that are saved on one layout and resume on others: the losses are those of a run on one rank, and the
// exported model is the same.
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

struct ResumeLayout {
  std::string name;
  int ranks;
  std::vector<std::string> layout;
};

void expect_same_model(const TinyRun& runs, const std::string& found, const std::string& wanted) {
  const auto ours = SafetensorsFolder::open(runs / found / "model"),
             theirs = SafetensorsFolder::open(runs / wanted / "model");
  EXPECT_EQ(ours.files().size(), theirs.files().size()) << found;
  for (const auto& [name, file] : theirs.files()) {
    ASSERT_TRUE(ours.contains(name)) << found << ": " << name;
    EXPECT_TRUE(at::allclose(ours.tensor(name), theirs.tensor(name), 1e-3, 1e-4)) << found << ": " << name;
  }
}

// Trains three steps on `first`, then three more steps there and on each layout of `others`.
void expect_runs_resume(const TinyRun& runs, const ResumeLayout& first, std::vector<ResumeLayout> others) {
  const auto train = [&](const ResumeLayout& which, const std::string& dir, int steps) {
    auto settings = which.layout;
    settings.push_back(fmt::format("train.steps={}", steps));
    settings.emplace_back("checkpoint.every=3");
    // Each rank of a pipeline has some of the parameters of these groups.
    settings.emplace_back(R"(optimizer.groups=["model.embed_tokens.* lr=1.0e-3", "*.layers.0.* weight_decay=0"])");
    const auto run = runs.train(dir, which.ranks, settings);
    ASSERT_EQ(run.exit_code, 0) << which.name << "\n" << run.err;
  };
  train({"one rank", 1, {}}, "whole", 6);
  train(first, "first", 3);
  others.push_back({"the same", first.ranks, first.layout});
  for (const auto& other : others) {
    if (::testing::Test::HasFatalFailure()) return;
    std::filesystem::copy(runs / "first", runs / other.name, std::filesystem::copy_options::recursive);
    train(other, other.name, 6);
    expect_same_run(runs, other.name, "whole");
    expect_same_model(runs, other.name, "whole");
  }
}

TEST(LayoutResume, PipelinedLlamaResumesOnOtherLayouts) {
  const TinyRun runs;
  runs.write("base/config.json", R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260,
      "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
      "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "torch_dtype": "float32",
      "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "bos_token_id": 258, "eos_token_id": 258})");
  expect_runs_resume(
      runs, {"pp 2 x cp 2", 4, {"parallel.pp=2", "parallel.cp=2"}},
      {{"one", 1, {}},
       {"tp 2 x dp 2", 4, {"parallel.tp=2"}},
       {"cp 2", 2, {"parallel.cp=2", "parallel.cp_rotate_method=alltoall"}},
       {"pp 2, V schedule", 2, {"parallel.pp=2", "parallel.schedule=DualPipeV", "parallel.dp_shard=1"}}});
}

TEST(LayoutResume, ExpertsResumeOnOtherLayouts) {
  const TinyRun runs;
  runs.have_experts(4, {{"output_router_logits", true}, {"router_aux_loss_coef", 0.01}});
  expect_runs_resume(runs, {"ep 2 x pp 2", 4, {"parallel.pp=2", "parallel.ep=2"}},
                     {{"one", 1, {}},
                      {"ep 4", 4, {"parallel.ep=4", "train.local_batch_size=1"}},
                      {"tp 2 x ep 2", 2, {"parallel.tp=2", "parallel.ep=2"}},
                      {"cp 2 x ep 2", 2, {"parallel.cp=2", "parallel.ep=2"}}});
}

}  // namespace
}  // namespace tessera::train
