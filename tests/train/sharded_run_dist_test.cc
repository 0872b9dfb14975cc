// Tests of how a run stores its sharded model: flat buffers, sharded gradients, and float32 parameters for a bfloat16
// model.
#include <gmock/gmock.h>

#include "tessera/base/files/file.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/models/files/weights.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/run/run_setup.h"
#include "tessera/train/step/step.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;
using testing::TempFolder;
using WorldPtr = std::shared_ptr<comm::World>;

constexpr int64_t kVocabulary = 24, kLength = 16;

// A folder of a tiny Llama without weights, and a recipe that starts from random weights.
Recipe sharded_recipe(const TempFolder& folder, std::vector<std::string> overrides = {}) {
  const auto model = folder / "model";
  std::filesystem::create_directories(model);
  publish_file(model / "config.json",
               R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "initializer_range": 0.3, "torch_dtype": "float32", "rms_norm_eps": 1e-05,
    "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2})");
  overrides.insert(overrides.begin(),
                   {"model.path=" + model.string(), "model.init=random", "data.train=[x]", "data.sequence_length=16"});
  return parse_recipe("", "tiny.yaml", overrides);
}

struct RunRig {
  Recipe recipe;
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<optim::Optimizer> optimizer;
  RunRig(Recipe given, const WorldPtr& world) : recipe(std::move(given)) {
    const auto config = load_model_config(recipe);
    model = build_model(recipe, config, build_run_mesh(recipe, world).mesh());
    optimizer = build_optimizer(recipe, *model);
  }
};

data::Batch rows_of(int64_t seed, const WorldPtr& world) {
  const auto first = 7 * (seed * world->size() + world->rank());
  const auto tokens =
      at::arange(first, first + 2 * kLength, at::kLong).mul_(11).remainder_(kVocabulary).view({2, kLength});
  const auto labels = at::full_like(tokens, kIgnoredLabel);
  labels.narrow(1, 0, kLength - 1).copy_(tokens.narrow(1, 1, kLength - 1));
  return data::make_batch(tokens, labels, at::arange(kLength, at::kLong).expand({2, kLength}).contiguous(),
                          at::zeros_like(tokens));
}

std::vector<at::Tensor> whole_parameters(nn::Module& model) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const auto& parameter : model.parameters()) values.push_back(full_tensor(parameter).clone());
  return values;
}

TEST(ShardedRun, AllGathersFromTheFlatBuffer) {
  const TempFolder folder;
  const auto recipe = sharded_recipe(folder);
  testing::run_ranks({.size = 2}, [&](const WorldPtr& world) {
    for (const bool pretrained : {false, true}) {
      auto of_this_run = recipe;
      if (pretrained) of_this_run.model.init = "pretrained";
      RunRig run(of_this_run, world);
      TrainStep step(*run.model, *run.optimizer, world->group(), {});
      step.run({rows_of(0, world)}, 1e-3);
      step.run({rows_of(1, world)}, 1e-3);
      EXPECT_GT(fsdp_stats(*run.model).all_gathers, 0);
      EXPECT_EQ(fsdp_stats(*run.model).piecewise_gathers, 0);
      if (!pretrained) {
        save_pretrained(*run.model, folder / "saved", "");
        if (world->rank() == 0) {
          std::filesystem::copy(folder / "saved" / "model.safetensors", folder / "model" / "model.safetensors");
        }
        comm::barrier(*world->group());
      }
    }
  });
}

TEST(ShardedRun, KeepsNoUnshardedGradientsBetweenMicroBatchesUnlessDeferred) {
  const TempFolder folder;
  const auto recipe = sharded_recipe(folder);
  testing::run_ranks({.size = 2}, [&](const WorldPtr& world) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool defer : {false, true}) {
      RunRig run(recipe, world);
      int64_t most = 0;
      run.model->register_forward_pre_hook(
          [&](nn::Module& model, nn::TensorRefs&) { most = std::max(most, fsdp_stats(model).accumulated_bytes); });
      TrainStep step(*run.model, *run.optimizer, world->group(), {.defer_gradient_sync = defer});
      step.run({rows_of(0, world), rows_of(1, world), rows_of(2, world)}, 1e-2);
      const int64_t groups = 3;
      EXPECT_EQ(fsdp_stats(*run.model).reduce_scatters, defer ? groups : 3 * groups);
      int64_t whole_bytes = 0;
      for (const auto& parameter : run.model->parameters()) whole_bytes += 4 * parameter.numel();
      if (defer) {
        EXPECT_GE(most, whole_bytes);
      } else {
        EXPECT_EQ(most, 0);
      }
      EXPECT_EQ(fsdp_stats(*run.model).accumulated_bytes, 0);
      results.push_back(whole_parameters(*run.model));
    }
    for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(results[0][i].allclose(results[1][i], 1e-4, 1e-5)) << i;
  });
}

TEST(ShardedRun, KeepsFloat32ParametersOfABfloat16Model) {
  const TempFolder folder;
  const auto recipe = sharded_recipe(folder, {"model.dtype=bfloat16", "precision.param=bfloat16"});
  const auto rounding = sharded_recipe(folder, {"model.dtype=bfloat16", "optimizer.master_weights=false"});
  EXPECT_THAT(describe_precision(recipe), HasSubstr("kept in float32 while training, the exported model is bfloat16"));
  EXPECT_THAT(describe_precision(rounding), HasSubstr("optimizer state are bfloat16"));
  testing::run_ranks({.size = 2}, [&](const WorldPtr& world) {
    RunRig run(recipe, world), rounded(rounding, world);
    const auto before = whole_parameters(*run.model), rounded_before = whole_parameters(*rounded.model);
    for (auto* each : {&run, &rounded}) {
      TrainStep step(*each->model, *each->optimizer, world->group(), {.max_grad_norm = 0});
      step.run({rows_of(0, world)}, 1e-5);  // the change is too small for bfloat16 values of about 1
    }
    EXPECT_EQ(before.back().scalar_type(), at::kFloat);
    EXPECT_FALSE(whole_parameters(*run.model).back().equal(before.back()));  // the last norm, whose weights are ones
    EXPECT_EQ(rounded_before.back().scalar_type(), at::kBFloat16);
    EXPECT_TRUE(whole_parameters(*rounded.model).back().equal(rounded_before.back()));
    for (const auto& name : run.optimizer->parameter_names()) {
      EXPECT_EQ(run.optimizer->state(name).at("exp_avg").scalar_type(), at::kFloat) << name;
    }
  });
}

}  // namespace
}  // namespace tessera::train
