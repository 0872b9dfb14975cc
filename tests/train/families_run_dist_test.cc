// Tests of every model family with the real program: the losses on one and on two ranks are equal. For a model with
// images the text model is trained, and the other tensors of the folder do not change.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/models/files/weights.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

std::string tiny_family(const std::string& changes) {
  return R"({"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
    "torch_dtype": "float32", "bos_token_id": 258, "eos_token_id": 258, )" +
         changes + "}";
}

const char* const kTinyGemma3 =
    R"("model_type": "gemma3_text", "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 9,
    "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 20.0)";

void expect_same_losses_on_one_and_two_ranks(const std::string& changes) {
  const TinyRun runs;
  runs.write("base/config.json", tiny_family(changes));
  for (const int ranks : {1, 2}) {
    const auto run = runs.train(std::to_string(ranks), ranks, {"train.steps=3", "checkpoint.export=never"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
  }
  const auto one = runs.metrics("1"), two = runs.metrics("2");
  ASSERT_EQ(one.size(), 3U);
  ASSERT_EQ(two.size(), 3U);
  for (size_t step = 0; step < one.size(); ++step) {
    for (const char* field : {"loss", "grad_norm"}) {
      const double wanted = one[step].at(field), found = two[step].at(field);
      EXPECT_LT(std::abs(found / wanted - 1), 1e-5) << field << " of step " << step;
    }
  }
}

TEST(FamiliesRun, Qwen2HasTheSameLossesOnOneAndTwoRanks) {
  expect_same_losses_on_one_and_two_ranks(
      R"("model_type": "qwen2", "use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1)");
}

TEST(FamiliesRun, Qwen3HasTheSameLossesOnOneAndTwoRanks) {
  expect_same_losses_on_one_and_two_ranks(R"("model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": true)");
}

TEST(FamiliesRun, Gemma3HasTheSameLossesOnOneAndTwoRanks) { expect_same_losses_on_one_and_two_ranks(kTinyGemma3); }

TEST(FamiliesRun, ExpertsDropTheSameTokensOnEveryLayout) {
  const TinyRun runs;
  runs.have_experts(2);
  const auto train = [&](const std::string& dir, int ranks, std::vector<std::string> more) {
    more.insert(more.end(), {"train.steps=3", "checkpoint.export=never"});
    const auto run = runs.train(dir, ranks, more);
    ASSERT_EQ(run.exit_code, 0) << run.err;
  };
  const std::string capacity = "model.expert_capacity_factor=0.75";
  train("all", 1, {});
  train("one", 1, {capacity});
  train("dp", 3, {capacity});
  train("ep", 2, {capacity, "parallel.ep=2"});
  train("pp", 2, {capacity, "parallel.pp=2", "train.local_batch_size=4"});
  for (const char* dir : {"dp", "ep", "pp"}) expect_same_run(runs, dir, "one");
  EXPECT_NE(runs.metrics("one")[0]["loss"], runs.metrics("all")[0]["loss"]) << "some are dropped";
}

TEST(FamiliesRun, MultimodalModelTrainsItsTextModelAndKeepsOtherTensors) {
  const TinyRun runs;
  const auto base = runs / "base";
  runs.write("base/config.json",
             R"({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "float32",
                 "image_token_index": 5000, "boi_token_index": 5001, "vision_config": {}, "text_config": )" +
                 tiny_family(kTinyGemma3) + "}");
  const auto model = make_model(ModelConfig::from_folder(base), {.device = at::kMeta});
  init_weights(*model, 5);
  const auto vision = at::arange(60, at::kFloat).view({3, 20}).to(at::kHalf);
  std::vector<SafetensorsSpec> specs = {{"vision_tower.weight", at::kHalf, {3, 20}}};
  const auto name_of = [](const std::string& name) {
    return "language_model.model." + name.substr(std::string("model.language_model.").size());
  };
  for (const auto& named : model->named_parameters()) {
    specs.push_back({name_of(named.name), at::kFloat, named.slot->parameter.sizes().vec()});
  }
  SafetensorsFolderWriter writer(base, specs);
  writer.write("vision_tower.weight", vision);
  for (const auto& named : model->named_parameters()) writer.write(name_of(named.name), named.slot->parameter.detach());
  writer.finish();

  const auto run = runs.train("a", 2, {"model.init=pretrained", "train.steps=3"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto before = SafetensorsFolder::open(base), after = SafetensorsFolder::open(runs / "a/model");
  EXPECT_EQ(after.files().size(), specs.size());
  const auto kept = after.tensor("vision_tower.weight").contiguous();
  ASSERT_EQ(kept.scalar_type(), at::kHalf);
  EXPECT_EQ(std::memcmp(kept.const_data_ptr(), vision.const_data_ptr(), vision.nbytes()), 0);
  for (const auto& spec : specs) {
    if (spec.name == "vision_tower.weight") continue;
    EXPECT_FALSE(at::equal(before.tensor(spec.name), after.tensor(spec.name))) << spec.name << " learned nothing";
  }
}

}  // namespace
}  // namespace tessera::train
