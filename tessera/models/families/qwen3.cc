// Qwen3: a Llama with a norm over each head of queries and keys, and a separate head_dim; layers may have a sliding
// window.
#include "tessera/models/decoder/decoder.h"
#include "tessera/models/families/families.h"

namespace tessera {
namespace {

std::shared_ptr<CausalLM> make_qwen3(const ModelConfig& config, const nn::ParameterOptions& options) {
  const auto layer = [&](int64_t index) {
    auto attention = attention_options(config, index);
    attention.qk_norm = nn::NormOptions{.eps = config.rms_norm_eps};
    return std::make_shared<DecoderLayer>(attention, config, options);
  };
  return std::make_shared<DecoderForCausalLM>(config, DecoderParts{.layer = layer}, options);
}

}  // namespace

std::vector<PlanKeys::Style> normed_layer_styles() {
  auto styles = llama_layer_styles();
  for (const char* norm : {"layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"}) {
    styles.push_back({norm, "replicated_with_grad_allreduce"});
  }
  return styles;
}

const ModelFamily& qwen3_family() {
  static const ModelFamily family{
      .architecture = "Qwen3ForCausalLM",
      .model_type = "qwen3",
      .config = {.vocab_size = 151936,
                 .intermediate_size = 22016,
                 .max_key_value_heads = 32,
                 .head_dim = 128,
                 .max_position_embeddings = 32768,
                 .biases = BiasKeys::kAttention,
                 .windows = {.has_window_key = true,
                             .has_use_window_key = true,
                             .has_layer_types_key = true,
                             .layer_slides = qwen_layer_slides}},
      .make = make_qwen3,
      .plan = {.name = "qwen", .top = {{"lm_head", "colwise_gather_output"}}, .layers = normed_layer_styles()},
      .gguf = {.architecture = "qwen3", .qk_norm = true}};
  return family;
}

}  // namespace tessera
