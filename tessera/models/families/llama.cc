// Llama: the decoder from which the other families are defined by their differences. See decoder.h.
#include "tessera/models/decoder/decoder.h"
#include "tessera/models/families/families.h"

namespace tessera {

std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const nn::ParameterOptions& options) {
  const auto layer = [&](int64_t index) {
    return std::make_shared<DecoderLayer>(attention_options(config, index), config, options);
  };
  return std::make_shared<DecoderForCausalLM>(config, DecoderParts{.layer = layer}, options);
}

std::vector<PlanKeys::Style> llama_layer_styles() {
  return {{"layers.*.self_attn.q_proj", "colwise"}, {"layers.*.self_attn.k_proj", "colwise"},
          {"layers.*.self_attn.v_proj", "colwise"}, {"layers.*.self_attn.o_proj", "rowwise"},
          {"layers.*.mlp.gate_proj", "colwise"},    {"layers.*.mlp.up_proj", "colwise"},
          {"layers.*.mlp.down_proj", "rowwise"}};
}

const ModelFamily& llama_family() {
  static const ModelFamily family{
      .architecture = "LlamaForCausalLM",
      .model_type = "llama",
      .config = {.intermediate_size = 11008,
                 .max_position_embeddings = 2048,
                 .biases = BiasKeys::kAttentionAndMlp,
                 .bos_token_id = 1,
                 .eos_token_id = 2},
      .make = make_llama,
      .plan = {.name = "llama", .top = {{"lm_head", "colwise_gather_output"}}, .layers = llama_layer_styles()},
      .gguf = {.architecture = "llama", .interleaved_rotary = true}};
  return family;
}

}  // namespace tessera
