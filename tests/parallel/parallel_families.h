// Tiny random models of every family, which are made parallel and compared with one rank.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/base/ignored_label.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/models/files/weights.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/parallel/parallelize_model.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {

struct TinyFamily {
  std::string architecture;
  int64_t heads = 4, kv_heads = 4;
  std::string more = "";  // further keys of config.json, each with a comma before it
};

// Sizes are not divisible by the ranks: a vocabulary of 37, an intermediate size of 22.
inline ModelConfig config_of(const TinyFamily& family) {
  const auto text = fmt::format(
      R"({{"architectures": ["{}"], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 22,
      "num_hidden_layers": 2, "num_attention_heads": {}, "num_key_value_heads": {}, "head_dim": 6,
      "max_position_embeddings": 64, "initializer_range": 0.3, "torch_dtype": "float32", "rms_norm_eps": 1e-05{}}})",
      family.architecture, family.heads, family.kv_heads, family.more);
  return ModelConfig::parse(text, family.architecture);
}

inline const std::string kGemmaKeys =
    R"(, "sliding_window": 3, "sliding_window_pattern": 2, "query_pre_attn_scalar": 6, "tie_word_embeddings": true)";

// Config keys for one layer with experts and one with an MLP.
inline const std::string kExpertKeys =
    R"(, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "mlp_only_layers": [1])";

inline std::vector<TinyFamily> all_families(int64_t heads = 4, int64_t kv_heads = 4) {
  return {{"LlamaForCausalLM", heads, kv_heads, R"(, "attention_bias": true, "mlp_bias": true)"},
          {"MistralForCausalLM", heads, kv_heads, R"(, "sliding_window": 3)"},
          {"Qwen2ForCausalLM", heads, kv_heads, R"(, "tie_word_embeddings": true)"},
          {"Qwen3ForCausalLM", heads, kv_heads, ""},
          {"Gemma3ForCausalLM", heads, kv_heads, kGemmaKeys},
          {"Qwen3MoeForCausalLM", heads, kv_heads, kExpertKeys}};
}

// A model whose parameters are all random, also the vectors.
inline std::shared_ptr<CausalLM> random_model(const ModelConfig& config,
                                              const std::optional<ParallelizeModelOptions>& parallel = std::nullopt) {
  auto model = make_model(config, {.device = at::kMeta});
  if (parallel) {
    parallelize_model(*model, *parallel);
    to_empty(*model, test_device());
  }
  init_weights(*model, 11, test_device());
  const at::NoGradGuard no_grad;
  uint64_t seed = 70;
  for (const auto& named : model->named_parameters()) {
    auto& parameter = named.slot->parameter;
    ++seed;
    if (parameter.dim() > 1) continue;
    const auto values = Values(seed)(parameter.sizes().vec(), 0.2) + named.slot->initial;
    parameter.copy_(is_dtensor(parameter) ? distribute_tensor(values, device_mesh(parameter), placements(parameter))
                                          : values);
  }
  return model;
}

struct StepOutcome {
  double loss = 0, norm = 0;
  std::map<std::string, at::Tensor> gradients;
};

// The mean loss of `rows` rows and its gradients. This rank computes part `part` of `parts` of the rows.
inline StepOutcome step_outcome(CausalLM& model, int64_t rows, int64_t length, int64_t part, int64_t parts,
                                comm::Group* world, int64_t ranks_with_same_rows) {
  auto generator = at::detail::createCPUGenerator(9);
  const auto text = here(at::randint(0, 37, {rows, length + 1}, generator, at::kLong));
  const auto own = text.tensor_split(parts, 0)[static_cast<size_t>(part)];
  auto labels = own.narrow(1, 1, length).clone();
  labels.select(1, 0).fill_(kIgnoredLabel);
  if (world != nullptr) set_gradient_divide_factor(model, 1);
  auto loss = model.loss_sum({.tokens = own.narrow(1, 0, length).contiguous()}, labels) /
              static_cast<double>(rows * (length - 1));
  loss.backward();
  StepOutcome out;
  const auto sum = loss.detach().to(at::kDouble).cpu().reshape({1}).clone();
  if (world != nullptr) comm::all_reduce(*world, sum).wait();
  out.loss = sum.item<double>() / static_cast<double>(ranks_with_same_rows);
  out.norm = optim::get_grad_norm(model.parameters());
  for (const auto& named : model.named_parameters()) out.gradients[named.name] = whole(named.slot->parameter.grad());
  return out;
}

// Errors that the order of sums may cause: for loss and norm, and for a gradient relative to its largest element.
struct StepTolerance {
  double numbers, gradients;
};
inline constexpr StepTolerance kFloatStep{1e-5, 1e-4}, kDoubleStep{1e-12, 1e-11};

// Gradients of `found` may be DTensors. The call is then COLLECTIVE over their meshes.
inline void expect_same_step(const StepOutcome& found, const StepOutcome& wanted, const std::string& what,
                             StepTolerance tolerance = kFloatStep) {
  EXPECT_NEAR(found.loss, wanted.loss, tolerance.numbers * wanted.loss) << what;
  EXPECT_NEAR(found.norm, wanted.norm, tolerance.numbers * wanted.norm) << what;
  ASSERT_EQ(found.gradients.size(), wanted.gradients.size()) << what;
  for (const auto& [name, gradient] : wanted.gradients) {
    ASSERT_TRUE(found.gradients.contains(name)) << what << ": " << name;
    const auto most = gradient.abs().max().item<double>();
    const auto difference = (whole(found.gradients.at(name)).cpu() - gradient.cpu()).abs_().max().item<double>();
    EXPECT_GT(most, 0) << what << ": " << name;
    EXPECT_LE(difference, tolerance.gradients * most) << what << ": " << name;
  }
}

struct ModelLayout {
  std::string name;
  int64_t replicas, shards, tensor_ranks;
  bool sequence_parallel = false;
  int ranks() const { return static_cast<int>(replicas * shards * tensor_ranks); }
  int64_t parts() const { return replicas * shards; }  // number of parts of the rows
  MeshPtr mesh(const WorldPtr& world) const {
    return init_device_mesh(world, test_device_type(), {replicas, shards, tensor_ranks},
                            {"dp_replicate", "dp_shard", "tp"});
  }
};

inline const std::vector<ModelLayout> kModelLayouts = {{"dp 2", 1, 2, 1},
                                                       {"tp 2", 1, 1, 2},
                                                       {"tp 2 with sequences", 1, 1, 2, true},
                                                       {"tp 3", 1, 1, 3},
                                                       {"tp 3 with sequences", 1, 1, 3, true},
                                                       {"tp 4", 1, 1, 4},
                                                       {"tp 4 with sequences", 1, 1, 4, true},
                                                       {"dp 2 x tp 2", 1, 2, 2},
                                                       {"dp 2 x tp 2 with sequences", 1, 2, 2, true},
                                                       {"hsdp 2 x 2", 2, 2, 1},
                                                       {"ddp 2 x tp 2", 2, 1, 2},
                                                       {"hsdp 2 x 2 x tp 2", 2, 2, 2},
                                                       {"hsdp 2 x 2 x tp 2 with sequences", 2, 2, 2, true}};

inline const std::vector<ActivationCheckpointing> kCheckpointings = {
    ActivationCheckpointing::kNone, ActivationCheckpointing::kMlp, ActivationCheckpointing::kSelective,
    ActivationCheckpointing::kFull};

// Two queries share a key-value head. Each rank of a layout has at least one key-value head.
inline std::vector<TinyFamily> families_for(const ModelLayout& layout) {
  const int64_t kv_heads = layout.tensor_ranks == 3 ? 3 : 4;
  return all_families(2 * kv_heads, kv_heads);
}

inline StepOutcome one_rank_outcome(const TinyFamily& family, int64_t rows, int64_t length) {
  return step_outcome(*random_model(config_of(family)), rows, length, 0, 1, nullptr, 1);
}

// COLLECTIVE over the world.
inline void expect_equals_one_rank(const ModelLayout& layout, const TinyFamily& family, const WorldPtr& world,
                                   ActivationCheckpointing checkpointing, int64_t rows, int64_t length,
                                   const StepOutcome& wanted, bool replicate_kv = false) {
  const auto model =
      random_model(config_of(family), ParallelizeModelOptions{.mesh = layout.mesh(world),
                                                              .sequence_parallel = layout.sequence_parallel,
                                                              .activation_checkpointing = checkpointing,
                                                              .replicate_kv = replicate_kv});
  const auto found = step_outcome(*model, rows, length, world->rank() / layout.tensor_ranks, layout.parts(),
                                  world->group().get(), layout.tensor_ranks);
  expect_same_step(found, wanted,
                   fmt::format("{}, {}, checkpointing {}, {} rows of {}", layout.name, family.architecture,
                               static_cast<int>(checkpointing), rows, length));
}

// Runs every layout, family and kind of activation checkpointing.
inline void expect_layouts_equal_one_rank(int64_t rows, int64_t length) {
  for (const auto& layout : kModelLayouts) {
    const auto families = families_for(layout);
    std::vector<StepOutcome> wanted;
    for (const auto& family : families) wanted.push_back(one_rank_outcome(family, rows, length));
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      for (const auto checkpointing : kCheckpointings) {
        for (size_t i = 0; i < families.size(); ++i) {
          expect_equals_one_rank(layout, families[i], world, checkpointing, rows, length, wanted[i]);
        }
      }
    });
  }
}

}  // namespace tessera::testing
