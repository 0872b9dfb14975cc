// What a model is made of: the config.json of a Hugging Face folder.
//
//   ModelConfig config = ModelConfig::from_folder(dir);
//   config.hidden_size; config.rope.theta;
//
// Old and new spellings are read (torch_dtype and dtype; rope_theta with rope_scaling, and rope_parameters). Keys that
// Tessera does not know are kept for saving. Every value is checked: sizes positive and bounded, heads divisible.
// Errors: kFormat for text that is no config or an architecture that is not supported, kConfig for values that cannot
// be. A value type; copies share the unknown keys.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/nn/activation.h"

namespace tessera {

enum class RopeKind { kDefault, kLinear, kDynamic, kYarn, kLlama3 };

struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;  // llama3
  int64_t original_max_position_embeddings = 0;
  std::optional<double> attention_factor;     // yarn
  double beta_fast = 32.0;                    // yarn
  double beta_slow = 1.0;                     // yarn
  double mscale = 0.0, mscale_all_dim = 0.0;  // yarn; 0: not given
  bool truncate = true;                       // yarn
};

// Layers in which each token takes some of many small MLPs. Also read where no layer has any.
struct ExpertConfig {
  int64_t count = 0;                 // in a layer; 0: no layer has experts
  int64_t chosen = 0;                // that a token takes
  int64_t inner = 0;                 // intermediate size of one
  bool normalise = false;            // the weights of those that a token takes add up to 1
  std::vector<bool> layers{};        // of each layer whether it has them
  bool balance = false;              // training adds the load-balance loss
  double balance_coefficient = 0.0;  // what it is multiplied with
  double capacity_factor = 0.0;      // nn::MoEOptions'; a setting of training, not of config.json
};

struct ModelConfig {
  std::string architecture;  // e.g. "LlamaForCausalLM"
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 2048;
  int64_t context_tokens = 2048;     // tokens that a sequence may have: max_position_embeddings, or more by rope
  int64_t sliding_window = 0;        // tokens that a token of a sliding layer sees, itself included; 0: no layer slides
  std::vector<bool> sliding_layers;  // of each layer whether it is one; empty: all are
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  nn::Activation activation = nn::Activation::kSilu;
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  double query_pre_attn_scalar = 0;      // scores are divided by its square root; 0: by that of head_dim
  double attn_logit_softcapping = 0;     // 0: none
  double final_logit_softcapping = 0;    // 0: none
  std::optional<c10::ScalarType> dtype;  // of the stored weights
  RopeConfig rope;
  ExpertConfig experts;
  std::optional<RopeConfig> local_rope;  // of the sliding layers, where they have their own
  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;
  std::optional<int64_t> pad_token_id;
  std::vector<int64_t> image_token_ids;  // tokens that stand for an image, which the model does not take

  // Tokens that this layer sees, itself included; 0: all.
  int64_t window_of(int64_t layer) const {
    return sliding_layers.empty() || sliding_layers[static_cast<size_t>(layer)] ? sliding_window : 0;
  }

  // Whether the angles of a token depend on the length of its sequence.
  bool has_dynamic_rope() const {
    return rope.kind == RopeKind::kDynamic || (local_rope && local_rope->kind == RopeKind::kDynamic);
  }

  bool has_experts(int64_t layer) const {
    return !experts.layers.empty() && experts.layers[static_cast<size_t>(layer)];
  }

  static ModelConfig from_folder(const std::filesystem::path& dir);
  // `name` is what errors call the text.
  static ModelConfig parse(std::string_view text, const std::string& name);

  // The file as it was read, with dtype set to what is saved.
  std::string to_json(c10::ScalarType saved_dtype) const;

 private:
  std::shared_ptr<const nlohmann::ordered_json> source_;
};

// "float32", "bfloat16", "float16", as config.json and recipes spell them; nullopt for others.
std::optional<c10::ScalarType> parse_dtype_name(std::string_view name);
std::string dtype_name(c10::ScalarType dtype);

// Those of model_families(): "LlamaForCausalLM", ...
const std::vector<std::string>& supported_architectures();

}  // namespace tessera
