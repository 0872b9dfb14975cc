// The configuration of a model, from the config.json of a Hugging Face folder.
//
//   ModelConfig config = ModelConfig::from_folder(dir);
//   config.hidden_size; config.rope.theta;
//
// Old and new names of keys are read (torch_dtype and dtype; rope_theta with rope_scaling, and rope_parameters).
// Unknown keys are kept for saving. Every value is checked: sizes must be positive and bounded, and numbers of heads
// must divide. Errors: kFormat for text that is not a config and for an unsupported architecture, kConfig for values
// that are not possible. ModelConfig is a value type; copies share the unknown keys.
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
  double mscale = 0.0, mscale_all_dim = 0.0;  // yarn; 0: not set
  bool truncate = true;                       // yarn
};

// Settings of mixture-of-experts layers: each token is sent to a few of many small MLPs. config.json may have these
// settings even if no layer has experts.
struct MoEConfig {
  int64_t num_experts = 0;                // experts per layer; 0: no layer has experts
  int64_t num_experts_per_tok = 0;        // experts per token
  int64_t intermediate_size = 0;          // intermediate size of one expert
  bool norm_topk_prob = false;            // the router weights of a token's experts are normalised to sum to 1
  std::vector<bool> layer_has_experts{};  // for each layer, whether it has experts
  bool adds_balance_loss = false;         // training adds the load-balancing loss
  double balance_coefficient = 0.0;       // factor of the load-balancing loss
  double capacity_factor = 0.0;           // see nn::MoEOptions; a training setting that is not in config.json
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
  int64_t context_tokens = 2048;  // longest sequence in tokens: max_position_embeddings, or more with rope scaling
  int64_t sliding_window = 0;  // tokens that a token of a sliding layer attends to, itself included; 0: no layer slides
  std::vector<bool> sliding_layers;  // for each layer, whether it slides; empty: all layers slide
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  nn::Activation activation = nn::Activation::kSilu;
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  double query_pre_attn_scalar = 0;      // attention scores are divided by its square root; 0: by sqrt(head_dim)
  double attn_logit_softcapping = 0;     // 0: no soft cap
  double final_logit_softcapping = 0;    // 0: no soft cap
  std::optional<c10::ScalarType> dtype;  // dtype of the stored weights
  RopeConfig rope;
  MoEConfig experts;
  std::optional<RopeConfig> local_rope;  // rope settings of the sliding layers, when they differ
  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;
  std::optional<int64_t> pad_token_id;
  std::vector<int64_t> image_token_ids;  // placeholder tokens of images, which the model does not support

  // Returns the number of tokens that a token of this layer attends to, itself included; 0: all earlier tokens.
  int64_t sliding_window_of_layer(int64_t layer) const {
    return sliding_layers.empty() || sliding_layers[static_cast<size_t>(layer)] ? sliding_window : 0;
  }

  // Whether the rotary angles of a token depend on the length of its sequence.
  bool has_dynamic_rope() const {
    return rope.kind == RopeKind::kDynamic || (local_rope && local_rope->kind == RopeKind::kDynamic);
  }

  bool has_experts(int64_t layer) const {
    return !experts.layer_has_experts.empty() && experts.layer_has_experts[static_cast<size_t>(layer)];
  }

  static ModelConfig from_folder(const std::filesystem::path& dir);
  // Parses the text of a config.json. Error messages call the text `name`.
  static ModelConfig parse(std::string_view text, const std::string& name);

  // Returns the JSON text that was read, with dtype set to `saved_dtype`.
  std::string to_json(c10::ScalarType saved_dtype) const;

 private:
  std::shared_ptr<const nlohmann::ordered_json> source_;
};

// Convert between a dtype and its name in config.json and recipes: "float32", "bfloat16", "float16". parse_dtype_name
// returns nullopt for an unknown name.
std::optional<c10::ScalarType> parse_dtype_name(std::string_view name);
std::string dtype_name(c10::ScalarType dtype);

// The architectures of model_families(): "LlamaForCausalLM", ...
const std::vector<std::string>& supported_architectures();

}  // namespace tessera
