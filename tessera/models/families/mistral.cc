// Mistral: a Llama with a sliding window.
#include "tessera/models/families/families.h"

namespace tessera {

// For a config.json with layer_types, transformers makes a MinistralForCausalLM: a Mistral model in which some layers
// have full attention.
const ModelFamily& mistral_family() {
  static const ModelFamily family{
      .architecture = "MistralForCausalLM",
      .model_type = "mistral",
      .other_model_type = "ministral",
      .config = {.intermediate_size = 14336,
                 .max_key_value_heads = 8,
                 .max_position_embeddings = 4096 * 32,
                 .windows = {.has_window_key = true, .has_layer_types_key = true},
                 .bos_token_id = 1,
                 .eos_token_id = 2},
      .make = make_llama,
      .plan = {.name = "llama", .top = {{"lm_head", "colwise_gather_output"}}, .layers = llama_layer_styles()},
      .gguf = {.architecture = "llama", .interleaved_rotary = true}};
  return family;
}

}  // namespace tessera
