// Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values; layers may have a sliding window.
#include "tessera/base/text/json.h"
#include "tessera/models/families/families.h"

namespace tessera {

bool qwen_layer_slides(const JsonReader& config, int64_t layer) {
  return layer >= config.integer("max_window_layers", 28, 0, int64_t{1} << 31);
}

const ModelFamily& qwen2_family() {
  static const ModelFamily family{
      .architecture = "Qwen2ForCausalLM",
      .model_type = "qwen2",
      .config = {.vocab_size = 151936,
                 .intermediate_size = 22016,
                 .max_key_value_heads = 32,
                 .max_position_embeddings = 32768,
                 .biases = BiasKeys::kQueryKeyValue,
                 .windows = {.has_window_key = true,
                             .has_use_window_key = true,
                             .has_layer_types_key = true,
                             .layer_slides = qwen_layer_slides}},
      .make = make_llama,
      .plan = {.name = "qwen", .top = {{"lm_head", "colwise_gather_output"}}, .layers = llama_layer_styles()},
      .gguf = {.architecture = "qwen2"}};
  return family;
}

}  // namespace tessera
