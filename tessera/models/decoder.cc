#include "tessera/models/decoder.h"

#include <cmath>

#include "tessera/base/error.h"

namespace tessera {

nn::AttentionOptions attention_options(const ModelConfig& config, int64_t layer) {
  const double scalar = config.query_pre_attn_scalar;
  return {.width = config.hidden_size,
          .heads = config.num_attention_heads,
          .kv_heads = config.num_key_value_heads,
          .head_dim = config.head_dim,
          .qkv_bias = config.qkv_bias,
          .output_bias = config.output_bias,
          .scores = {.scale = scalar > 0 ? 1 / std::sqrt(scalar) : 0, .softcap = config.attn_logit_softcapping},
          .layer = layer};
}

DecoderLayer::DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config,
                           const nn::ParameterOptions& options, const nn::NormOptions& norm) {
  register_module("self_attn", self_attn, std::make_shared<nn::Attention>(attention, options));
  register_module("mlp", mlp,
                  std::make_shared<nn::MLP>(config.hidden_size, config.intermediate_size,
                                            nn::MLPOptions{config.activation, config.mlp_bias}, options));
  register_module("input_layernorm", input_layernorm, std::make_shared<nn::RMSNorm>(config.hidden_size, norm, options));
  register_module("post_attention_layernorm", post_attention_layernorm,
                  std::make_shared<nn::RMSNorm>(config.hidden_size, norm, options));
}

DecoderLayer::DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config,
                           const nn::ParameterOptions& options)
    : DecoderLayer(attention, config, options, {.eps = config.rms_norm_eps}) {}

at::Tensor DecoderLayer::forward(const at::Tensor& x, const nn::AttentionContext& context) {
  const auto attended = x + (*self_attn)((*input_layernorm)(x), context);
  return attended + (*mlp)((*post_attention_layernorm)(attended));
}

DecoderLayers::DecoderLayers(int64_t count, const std::function<std::shared_ptr<DecoderLayer>(int64_t layer)>& make) {
  list.resize(static_cast<size_t>(count));
  for (int64_t layer = 0; layer < count; ++layer) {
    register_module(std::to_string(layer), list[static_cast<size_t>(layer)], make(layer));
  }
}

DecoderModel::DecoderModel(const ModelConfig& config, const DecoderParts& parts, const nn::ParameterOptions& options)
    : config_(config) {
  const nn::EmbeddingOptions embedding{.padding_id = config.pad_token_id.value_or(-1), .scale = parts.embedding_scale};
  const auto rotary = [&](const RopeConfig& rope) {
    return std::make_shared<RotaryEmbedding>(rope, config.head_dim, config.max_position_embeddings);
  };
  register_module("embed_tokens", embed_tokens,
                  std::make_shared<nn::Embedding>(config.vocab_size, config.hidden_size, options, embedding));
  register_module("layers", layers, std::make_shared<DecoderLayers>(config.num_hidden_layers, parts.layer));
  register_module("norm", norm,
                  std::make_shared<nn::RMSNorm>(
                      config.hidden_size, parts.norm.value_or(nn::NormOptions{.eps = config.rms_norm_eps}), options));
  register_module("rotary_emb", rotary_emb, rotary(config.rope));
  if (config.local_rope) register_module("rotary_emb_local", rotary_emb_local, rotary(*config.local_rope));
}

nn::AttentionPattern DecoderModel::pattern(const ModelInputs& inputs, const at::Tensor& x, bool sliding) const {
  return nn::attention_pattern({.rows = inputs.tokens.size(0),
                                .tokens = inputs.tokens.size(1),
                                .cached = inputs.cache ? inputs.cache->length() : 0,
                                .document_ids = inputs.document_ids,
                                .sliding_window = sliding ? config_.sliding_window : 0},
                               x.options());
}

at::Tensor DecoderModel::forward(const ModelInputs& inputs) {
  auto x = (*embed_tokens)(inputs.tokens);
  const int64_t cached = inputs.cache ? inputs.cache->length() : 0, length = inputs.tokens.size(1);
  const auto positions = inputs.positions.defined()
                             ? inputs.positions
                             : at::arange(cached, cached + length, inputs.tokens.options()).unsqueeze(0);
  const auto angles = (*rotary_emb)(x, positions);
  const auto local_angles = rotary_emb_local ? (*rotary_emb_local)(x, positions) : angles;
  std::optional<nn::AttentionContext> full, sliding;
  for (size_t i = 0; i < layers->list.size(); ++i) {
    const bool slides = config_.window_of(static_cast<int64_t>(i)) > 0;
    auto& context = slides ? sliding : full;
    if (!context) {
      context = nn::AttentionContext{slides ? local_angles : angles, pattern(inputs, x, slides), inputs.cache};
    }
    x = (*layers->list[i])(x, *context);
  }
  if (inputs.cache) inputs.cache->advance(length);
  return (*norm)(x);
}

std::shared_ptr<nn::Head> make_head(const ModelConfig& config, const nn::Embedding& embedding,
                                    const nn::ParameterOptions& options) {
  const nn::ParameterOptions head_options{options.dtype,
                                          config.tie_word_embeddings ? at::Device(at::kMeta) : options.device};
  auto head =
      std::make_shared<nn::Head>(config.hidden_size, config.vocab_size, head_options, config.final_logit_softcapping);
  if (config.tie_word_embeddings) nn::Module::set_parameter(head->own_parameters().front(), embedding.weight);
  return head;
}

at::Tensor decode(DecoderModel& model, nn::Head& head, const ModelInputs& inputs) {
  TESSERA_CHECK(inputs.tokens.defined() && inputs.tokens.dim() == 2 && inputs.tokens.scalar_type() == at::kLong &&
                    inputs.tokens.numel() > 0,
                ErrorKind::kShape, "[models.forward] tokens: wanted int64 [B, T] with at least one token");
  const auto hidden = model(inputs);
  if (inputs.labels.defined()) return head(hidden, inputs.labels);
  if (inputs.targets.defined()) return head(hidden, nn::TokenTargets{inputs.targets});
  const int64_t length = hidden.size(1), kept = inputs.logits_to_keep;
  return head(kept > 0 && kept < length ? hidden.narrow(1, length - kept, kept) : hidden);
}

DecoderForCausalLM::DecoderForCausalLM(const ModelConfig& config, const DecoderParts& parts,
                                       const nn::ParameterOptions& options)
    : CausalLM(config) {
  register_module("model", model, std::make_shared<DecoderModel>(config, parts, options));
  register_module("lm_head", lm_head, make_head(config, *model->embed_tokens, options));
}

at::Tensor DecoderForCausalLM::forward(const ModelInputs& inputs) { return decode(*model, *lm_head, inputs); }

std::vector<std::shared_ptr<nn::Module>> DecoderForCausalLM::blocks() {
  return {model->layers->list.begin(), model->layers->list.end()};
}

}  // namespace tessera
