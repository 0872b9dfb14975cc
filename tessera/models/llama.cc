#include "tessera/models/llama.h"

#include "tessera/base/error.h"
#include "tessera/models/detail/gguf_llama.h"
#include "tessera/models/rope.h"

namespace tessera {

LlamaDecoderLayer::LlamaDecoderLayer(const ModelConfig& config, int64_t layer, const nn::ParameterOptions& options) {
  const nn::AttentionOptions attention{.width = config.hidden_size,
                                       .heads = config.num_attention_heads,
                                       .kv_heads = config.num_key_value_heads,
                                       .head_dim = config.head_dim,
                                       .qkv_bias = config.attention_bias,
                                       .output_bias = config.attention_bias,
                                       .layer = layer};
  register_module("self_attn", self_attn, std::make_shared<nn::Attention>(attention, options));
  register_module("mlp", mlp,
                  std::make_shared<nn::MLP>(config.hidden_size, config.intermediate_size, config.mlp_bias, options));
  register_module("input_layernorm", input_layernorm,
                  std::make_shared<nn::RMSNorm>(config.hidden_size, config.rms_norm_eps, options));
  register_module("post_attention_layernorm", post_attention_layernorm,
                  std::make_shared<nn::RMSNorm>(config.hidden_size, config.rms_norm_eps, options));
}

at::Tensor LlamaDecoderLayer::forward(const at::Tensor& x, const nn::AttentionContext& context) {
  const auto attended = x + (*self_attn)((*input_layernorm)(x), context);
  return attended + (*mlp)((*post_attention_layernorm)(attended));
}

LlamaLayers::LlamaLayers(const ModelConfig& config, const nn::ParameterOptions& options) {
  list.resize(static_cast<size_t>(config.num_hidden_layers));
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    register_module(std::to_string(layer), list[static_cast<size_t>(layer)],
                    std::make_shared<LlamaDecoderLayer>(config, layer, options));
  }
}

LlamaModel::LlamaModel(const ModelConfig& config, const nn::ParameterOptions& options) : config_(config) {
  register_module("embed_tokens", embed_tokens,
                  std::make_shared<nn::Embedding>(config.vocab_size, config.hidden_size, options,
                                                  config.pad_token_id.value_or(-1)));
  register_module("layers", layers, std::make_shared<LlamaLayers>(config, options));
  register_module("norm", norm, std::make_shared<nn::RMSNorm>(config.hidden_size, config.rms_norm_eps, options));
}

nn::AttentionContext LlamaModel::attention_context(const ModelInputs& inputs, const at::TensorOptions& options) const {
  const int64_t cached = inputs.cache ? inputs.cache->length() : 0, length = inputs.tokens.size(1);
  const auto positions = inputs.positions.defined()
                             ? inputs.positions
                             : at::arange(cached, cached + length, inputs.tokens.options()).unsqueeze(0);
  auto [cos, sin] = rope_table(config_, positions);
  const nn::AttentionPatternOptions wanted{.rows = inputs.tokens.size(0),
                                           .tokens = length,
                                           .cached = cached,
                                           .document_ids = inputs.document_ids,
                                           .sliding_window = config_.sliding_window};
  return {.cos = cos, .sin = sin, .pattern = nn::attention_pattern(wanted, options), .cache = inputs.cache};
}

at::Tensor LlamaModel::forward(const ModelInputs& inputs) {
  auto x = (*embed_tokens)(inputs.tokens);
  const auto context = attention_context(inputs, x.options());
  for (const auto& layer : layers->list) x = (*layer)(x, context);
  if (inputs.cache) inputs.cache->advance(inputs.tokens.size(1));
  return (*norm)(x);
}

LlamaForCausalLM::LlamaForCausalLM(const ModelConfig& config, const nn::ParameterOptions& options) : CausalLM(config) {
  register_module("model", model, std::make_shared<LlamaModel>(config, options));
  // A tied head allocates nothing: its slot shows the embedding.
  const nn::ParameterOptions head_options{options.dtype,
                                          config.tie_word_embeddings ? at::Device(at::kMeta) : options.device};
  register_module("lm_head", lm_head, std::make_shared<nn::Head>(config.hidden_size, config.vocab_size, head_options));
  if (config.tie_word_embeddings) set_parameter(lm_head->own_parameters().front(), model->embed_tokens->weight);
}

at::Tensor LlamaForCausalLM::forward(const ModelInputs& inputs) {
  TESSERA_CHECK(inputs.tokens.defined() && inputs.tokens.dim() == 2 && inputs.tokens.scalar_type() == at::kLong &&
                    inputs.tokens.numel() > 0,
                ErrorKind::kShape, "[models.forward] tokens: wanted int64 [B, T] with at least one token");
  const auto hidden = (*model)(inputs);
  if (inputs.labels.defined()) return (*lm_head)(hidden, inputs.labels);
  const int64_t length = hidden.size(1);
  const int64_t kept = inputs.logits_to_keep > 0 ? std::min(inputs.logits_to_keep, length) : length;
  return (*lm_head)(hidden.narrow(1, length - kept, kept));
}

std::vector<std::shared_ptr<nn::Module>> LlamaForCausalLM::blocks() {
  return {model->layers->list.begin(), model->layers->list.end()};
}

namespace {

std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const nn::ParameterOptions& options) {
  return std::make_shared<LlamaForCausalLM>(config, options);
}

}  // namespace

const ModelFamily& llama_family() {
  static const ModelFamily family{
      .architecture = "LlamaForCausalLM",
      .model_type = "llama",
      .config = {.intermediate_size = 11008, .max_position_embeddings = 2048, .biases = true},
      .make = make_llama,
      .gguf_architecture = "llama",
      .gguf_tensors = detail::llama_tensors};
  return family;
}

const ModelFamily& mistral_family() {
  static const ModelFamily family{.architecture = "MistralForCausalLM",
                                  .model_type = "mistral",
                                  .config = {.intermediate_size = 14336,
                                             .most_key_value_heads = 8,
                                             .max_position_embeddings = 4096 * 32,
                                             .sliding_window = true},
                                  .make = make_llama,
                                  .gguf_architecture = "llama",
                                  .gguf_tensors = detail::llama_tensors};
  return family;
}

}  // namespace tessera
