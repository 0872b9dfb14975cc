// Tests of training runs of the real program with adapters, with optimizers that need whole matrices, and with an early
// end.
#include <gmock/gmock.h>

#include "tessera/formats/safetensors/safetensors.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

using Words = std::vector<std::string>;

Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

struct NamedLayout {
  std::string name;
  int ranks;
  Words overrides;
};

const NamedLayout kShardedPair = {"fsdp", 2, {}},
                  kReplicatedPair = {"ddp", 2, {"parallel.dp_replicate=2", "parallel.dp_shard=1"}},
                  kTensorPair = {"tp", 2, {"parallel.tp=2"}},
                  kHybridFour = {"hsdp",
                                 4,
                                 {"parallel.dp_replicate=2", "train.local_batch_size=1",
                                  "parallel.activation_checkpointing=full"}},
                  kSequenceFour = {"tp-sequences", 4, {"parallel.tp=2", "parallel.sequence_parallel=true"}};

// Runs one rank and all layouts, and compares their steps.
void expect_layouts_equal_one_rank(const TinyRun& runs, const Words& settings, const std::vector<NamedLayout>& layouts,
                                   double tolerance = 1e-5) {
  const auto one = runs.train("one", 1, settings);
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_LT(runs.metrics("one").back()["loss"], 0.97 * runs.metrics("one").front()["loss"].get<double>());
  for (const auto& layout : layouts) {
    const auto run = runs.train(layout.name, layout.ranks, joined(settings, layout.overrides));
    ASSERT_EQ(run.exit_code, 0) << layout.name << ": " << run.err;
    const auto found = runs.metrics(layout.name), wanted = runs.metrics("one");
    ASSERT_EQ(found.size(), wanted.size()) << layout.name;
    for (size_t i = 0; i < found.size(); ++i) {
      for (const char* what : {"loss", "grad_norm"}) {
        const double value = wanted[i][what];
        EXPECT_NEAR(found[i][what].get<double>(), value, tolerance * value) << layout.name << ", step " << i + 1;
      }
    }
  }
}

const Words kLora = {"lora.rank=4",       "lora.alpha=16",      "train.steps=20",
                     "optimizer.lr=0.01", "checkpoint.every=0", "checkpoint.export=never"};

TEST(LoraRuns, FsdpAndTensorParallelEqualOneRank) {
  const TinyRun runs;
  expect_layouts_equal_one_rank(runs, kLora, {kShardedPair, kTensorPair});
}

TEST(LoraRuns, DoraWithDropoutEqualsOneRankOnDdpHsdpAndSequenceParallel) {
  const TinyRun runs;
  expect_layouts_equal_one_rank(runs, joined(kLora, {"lora.dora=true", "lora.dropout=0.2", "train.steps=6"}),
                                {kReplicatedPair, kHybridFour, kSequenceFour});
}

TEST(LoraRuns, ResumeOnAnotherLayoutAndExportAdapters) {
  const TinyRun runs;
  const Words settings = {"lora.rank=2", "lora.target_modules=[q_proj, down_proj]", "lora.dropout=0.1",
                          "checkpoint.every=2"};
  const auto whole = runs.train("whole", 1, settings);
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const auto begun = runs.train("run", 2, joined(settings, {"train.steps=4", "parallel.tp=2"}));
  ASSERT_EQ(begun.exit_code, 0) << begun.err;
  const auto ended = runs.train("run", 2, settings);
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  expect_same_run(runs, "run", "whole");
  const auto file = SafetensorsFile::open(runs / "run/model/adapter_model.safetensors");
  EXPECT_EQ(file->entries().size(), 2u * 2 * 2);
  const std::string name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
  ASSERT_TRUE(file->contains(name));
  EXPECT_GT(file->tensor(name).abs().max().item<double>(), 0);
  EXPECT_TRUE(std::filesystem::exists(runs / "run/model/adapter_config.json"));
  EXPECT_TRUE(std::filesystem::exists(runs / "run/model/tokenizer.json"));

  // Another run starts from the adapter of the first run. The merged adapter is a complete model.
  const auto from = runs.train("from", 1,
                               {"lora.path=" + (runs / "run/model").string(), "lora.merge=true", "train.steps=1",
                                "checkpoint.every=0", "schedule.warmup_steps=0"});
  ASSERT_EQ(from.exit_code, 0) << from.err;
  EXPECT_LT(runs.metrics("from").front()["loss"], runs.metrics("whole").front()["loss"].get<double>());
  EXPECT_FALSE(runs.weights("from").empty());
  const auto other = runs.train("run", 1, {"lora.rank=3", "checkpoint.every=2", "train.steps=8"});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.err, HasSubstr("written with another lora"));
}

// Four layers, enough for four stages.
const char* const kDeepModel = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260,
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "torch_dtype": "float32",
  "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "bos_token_id": 258, "eos_token_id": 258})";

const NamedLayout kInterleavedPair = {"interleaved",
                                      2,
                                      {"parallel.pp=2", "parallel.schedule=Interleaved1F1B",
                                       "parallel.layers_per_stage=1", "parallel.activation_checkpointing=full"}},
                  kZeroBubbleFour = {"zero-bubble",
                                     4,
                                     {"parallel.pp=2", "parallel.schedule=ZBVZeroBubble", "train.local_batch_size=1"}},
                  kReplicatedStages = {
                      "stages-ddp", 4, {"parallel.pp=2", "parallel.dp_replicate=2", "parallel.dp_shard=1"}};

TEST(LoraRuns, DropoutOnPipelinesEqualsOneRank) {
  const TinyRun runs;
  runs.write("base/config.json", kDeepModel);
  expect_layouts_equal_one_rank(runs, joined(kLora, {"lora.dropout=0.2", "train.steps=6", "schedule.warmup_steps=0"}),
                                {kInterleavedPair, kZeroBubbleFour, kReplicatedStages});
}

TEST(LoraRuns, DropoutWithContextParallelEqualsOneRank) {
  const TinyRun runs;
  expect_layouts_equal_one_rank(
      runs,
      joined(kLora, {"lora.dropout=0.2", "lora.dora=true", "train.steps=6", "schedule.warmup_steps=0",
                     "data.sequence_length=45"}),
      {{"cp", 2, {"parallel.cp=2"}},
       {"cp-sequences", 4, {"parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true"}},
       {"cp-stages", 4, {"parallel.cp=2", "parallel.pp=2"}}});
}

std::map<std::string, at::Tensor> adapters_of(const TinyRun& runs, const std::string& run) {
  const auto file = SafetensorsFile::open(runs / run / "model/adapter_model.safetensors");
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, entry] : file->entries()) out[name] = file->tensor(name);
  return out;
}

TEST(LoraRuns, PipelinesResumeWithoutPipelineAndExportOneFolder) {
  const TinyRun runs;
  runs.write("base/config.json", kDeepModel);
  // The first two stages have no adapter.
  const Words settings = {"lora.rank=2", "lora.target_modules=[2.self_attn.q_proj, 3.mlp.down_proj]",
                          "lora.dropout=0.1", "checkpoint.every=2"};
  const Words stages = {"parallel.pp=2", "parallel.schedule=Interleaved1F1B", "parallel.layers_per_stage=1"};
  const auto whole = runs.train("whole", 1, settings);
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const auto begun = runs.train("run", 2, joined(joined(settings, stages), {"train.steps=4"}));
  ASSERT_EQ(begun.exit_code, 0) << begun.err;
  EXPECT_EQ(adapters_of(runs, "run").size(), 4u) << "of both ranks";
  const auto ended = runs.train("run", 2, settings);
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  expect_same_run(runs, "run", "whole");
  const auto staged = runs.train("staged", 4, joined(settings, stages));
  ASSERT_EQ(staged.exit_code, 0) << staged.err;
  const auto wanted = adapters_of(runs, "whole"), found = adapters_of(runs, "staged");
  ASSERT_EQ(found.size(), 4u);
  for (const auto& [name, value] : wanted) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_TRUE(found.at(name).allclose(value, 1e-3, 1e-5)) << name;
  }
  EXPECT_EQ(read_file(runs / "staged/model/adapter_config.json"), read_file(runs / "whole/model/adapter_config.json"));

  // Pipeline stages start from the adapter's folder, and merge.
  const Words from = {"lora.path=" + (runs / "whole/model").string(), "lora.merge=true", "train.steps=1",
                      "checkpoint.every=0", "schedule.warmup_steps=0"};
  for (const auto& [name, ranks, more] : {NamedLayout{"from", 1, {}}, NamedLayout{"from-stages", 2, stages}}) {
    const auto run = runs.train(name, ranks, joined(from, more));
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }
  expect_same_run(runs, "from-stages", "from");
  const auto merged = SafetensorsFile::open(runs / "from/model/model.safetensors");
  const auto merged_stages = SafetensorsFile::open(runs / "from-stages/model/model.safetensors");
  ASSERT_EQ(merged_stages->entries().size(), merged->entries().size());
  for (const auto& [name, entry] : merged->entries()) {
    EXPECT_TRUE(merged_stages->tensor(name).allclose(merged->tensor(name), 1e-4, 1e-6)) << name;
  }
}

TEST(LoraRuns, QuantizedBaseEqualsOneRankAndResumesOnAnotherLayout) {
  const TinyRun runs;
  runs.write("base/config.json", kDeepModel);
  const Words packed =
      joined(kLora, {"lora.quantize=nf4", "lora.double_quant=true", "train.steps=6", "schedule.warmup_steps=0"});
  expect_layouts_equal_one_rank(runs, packed,
                                {kShardedPair,
                                 kSequenceFour,
                                 {"stages-fsdp", 4, {"parallel.pp=2"}},
                                 {"parts", 4, {"parallel.cp=2", "parallel.dp_replicate=2"}}});
  const auto plain = runs.train("plain", 1, joined(kLora, {"train.steps=1", "schedule.warmup_steps=0"}));
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  const double loss = runs.metrics("plain")[0]["loss"], rounded = runs.metrics("one")[0]["loss"];
  EXPECT_NEAR(rounded, loss, 0.05 * loss);
  EXPECT_NE(rounded, loss);

  const Words saved = joined(packed, {"checkpoint.every=2", "checkpoint.export=final", "lora.merge=true"});
  ASSERT_EQ(runs.train("run", 2, joined(saved, {"parallel.pp=2", "train.steps=4"})).exit_code, 0);
  const auto ended = runs.train("run", 2, saved);
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  expect_same_run(runs, "run", "one");
  EXPECT_FALSE(runs.weights("run").empty());
  const auto other = runs.train("run", 1, joined(saved, {"lora.double_quant=false", "train.steps=8"}));
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.err, HasSubstr("written with another lora"));
}

// One layer with 64 columns, so that there are whole blocks of 256.
const char* const kWideModel = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260,
  "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "torch_dtype": "float32",
  "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "bos_token_id": 258, "eos_token_id": 258})";

Words matrix_optimizer(const std::string& name) {
  return {"optimizer.name=" + name, "train.steps=4",
          "checkpoint.every=0",     "checkpoint.export=never",
          "optimizer.lr=0.01",      "optimizer.groups=[\"*.self_attn.* lr=0.02 weight_decay=0\"]",
          "schedule.name=wsd",      "schedule.warmup_steps=1",
          "schedule.decay_steps=2", "schedule.decay_type=linear"};
}

TEST(MatrixOptimizerRuns, EveryLayoutEqualsOneRank) {
  const TinyRun muon, adamw8bit;
  for (const auto* runs : {&muon, &adamw8bit}) runs->write("base/config.json", kWideModel);
  // Muon rounds gradients to bfloat16, so a float32 rounding error may change the result of this rounding. An update
  // may then differ by 2^-8 of itself, and a loss by 2^-8 of its decrease.
  expect_layouts_equal_one_rank(muon, matrix_optimizer("muon"), {kShardedPair, kSequenceFour}, 1e-3);
  EXPECT_NEAR(muon.metrics("one")[3]["lr"].get<double>(), 0.0055, 1e-9) << "half way to a tenth";
  if (testing::on_accelerator()) return;  // accelerators have no 8-bit moments yet
  expect_layouts_equal_one_rank(adamw8bit, matrix_optimizer("adamw8bit"), {kHybridFour, kTensorPair}, 2e-5);
}

TEST(EarlyStoppingRuns, ExportTheModelAndStayStopped) {
  const TinyRun runs;
  const Words settings = {"data.validation=[" + (runs / "held-out.jsonl").string() + "]",
                          "train.validate_every=1",
                          "train.early_stopping.patience=2",
                          "train.early_stopping.min_delta=100",
                          "train.steps=6",
                          "checkpoint.every=4"};
  const auto run = runs.train("run", 2, settings);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("[train.early_stopping] after step 2: validation loss has not fallen below"));
  EXPECT_EQ(runs.metrics("run").size(), 2u);
  EXPECT_EQ(runs.metrics("run", "early_stop").size(), 1u);
  EXPECT_FALSE(runs.weights("run").empty());
  EXPECT_THAT(runs.latest("run"), HasSubstr("2"));
  const auto again = runs.train("run", 1, settings);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(runs.metrics("run").size(), 2u) << "it stays ended";
  auto more = settings;
  more[2] = "train.early_stopping.patience=3";
  const auto goes_on = runs.train("run", 1, more);
  ASSERT_EQ(goes_on.exit_code, 0) << goes_on.err;
  EXPECT_EQ(runs.metrics("run").size(), 3u) << "one more validation, after one more step";
  const auto without = runs.train("without", 1, {"train.early_stopping.patience=2"});
  EXPECT_EQ(without.exit_code, 2);
  EXPECT_THAT(without.err, HasSubstr("train.early_stopping.patience: found 2 without validations"));
}

}  // namespace
}  // namespace tessera::train
