// What makes a family of models: one row each, beside its model.
//
//   const ModelFamily& family = family_of("MistralForCausalLM");     // Error kFormat lists those that there are
//   std::shared_ptr<CausalLM> model = family.make(config, options);
//
// A new family is its model file with its row, named in model_families(): reading config.json, making the model and
// converting GGUF files look here. Rows are constants; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/nn/options.h"

namespace tessera {

class CausalLM;
struct ModelConfig;
namespace detail {
struct LlamaShape;
struct LlamaTensor;
}  // namespace detail

// What the configuration class of transformers takes where config.json leaves a key out, and which keys it knows.
struct ConfigKeys {
  int64_t intermediate_size = 0;
  int64_t most_key_value_heads =
      0;  // num_key_value_heads is this or the number of heads, whichever is less; 0: the latter
  int64_t max_position_embeddings = 0;
  bool sliding_window = false;
  bool biases = false;  // attention_bias and mlp_bias
};

struct ModelFamily {
  std::string_view architecture;  // in config.json
  std::string_view model_type;    // the same, where architectures is left out
  ConfigKeys config;
  std::shared_ptr<CausalLM> (*make)(const ModelConfig& config, const nn::ParameterOptions& options) = nullptr;
  // GGUF: general.architecture there, and what its tensors are called on both sides. Where families share a name, a
  // file becomes a model of the first. Empty: cannot be converted.
  std::string_view gguf_architecture{};
  std::vector<detail::LlamaTensor> (*gguf_tensors)(const detail::LlamaShape& shape) = nullptr;
};

const std::vector<const ModelFamily*>& model_families();

// Null for one that is not there; of a GGUF architecture, the family that such a file becomes.
const ModelFamily* find_family(std::string_view architecture);
const ModelFamily* find_family_of_type(std::string_view model_type);
const ModelFamily* find_family_of_gguf(std::string_view gguf_architecture);
const ModelFamily& family_of(std::string_view architecture);

}  // namespace tessera
