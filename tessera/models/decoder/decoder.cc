#include "tessera/models/decoder/decoder.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/kernels/attention/flash_attention.h"
#include "tessera/mesh/host_memory.h"
#include "tessera/nn/attention/context_parallel_guard.h"

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

nn::MoEOptions moe_options(const ModelConfig& config) {
  return {.width = config.hidden_size,
          .inner = config.experts.intermediate_size,
          .experts = config.experts.num_experts,
          .experts_per_token = config.experts.num_experts_per_tok,
          .normalise_top_k = config.experts.norm_topk_prob,
          .activation = config.activation,
          .capacity_factor = config.experts.capacity_factor};
}

// The result lists the numbers, besides tensor shapes, on which the kernels of a layer depend. With plain causal
// attention (pattern.pieces is empty) there are none. With padded document lists (nn::FixedDocumentSizes) the kernels
// depend only on the length of the longest document. With document lists that are not padded the kernels also depend on
// the lengths of all documents, which change from batch to batch. Then a call of the layer cannot be replayed from a
// CUDA graph, and read_numbers() returns nullopt; so it does with a paged KV cache and under context parallelism.
std::optional<std::vector<int64_t>> LayerContext::read_numbers() const {
  if (paged || pattern.context || nn::ContextParallelGuard::current()) return std::nullopt;
  if (pattern.pieces.empty()) return std::vector<int64_t>{};
  if (!pattern.documents.has_fixed_sizes) return std::nullopt;
  return std::vector<int64_t>{pattern.documents.longest};
}

DecoderLayer::DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config,
                           const nn::ParameterOptions& options, const nn::NormOptions& norm) {
  register_module("self_attn", self_attn, std::make_shared<nn::Attention>(attention, options));
  if (config.has_experts(attention.layer)) {
    register_module("mlp", moe, std::make_shared<nn::MoE>(moe_options(config), options));
  } else {
    register_module("mlp", mlp,
                    std::make_shared<nn::MLP>(config.hidden_size, config.intermediate_size,
                                              nn::MLPOptions{config.activation, config.mlp_bias}, options));
  }
  register_module("input_layernorm", input_layernorm, std::make_shared<nn::RMSNorm>(config.hidden_size, norm, options));
  register_module("post_attention_layernorm", post_attention_layernorm,
                  std::make_shared<nn::RMSNorm>(config.hidden_size, norm, options));
}

DecoderLayer::DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config,
                           const nn::ParameterOptions& options)
    : DecoderLayer(attention, config, options, {.eps = config.rms_norm_eps}) {}

at::Tensor DecoderLayer::feed_forward(const at::Tensor& x, const LayerContext& context) {
  return moe ? (*moe)(x, nn::NonPaddingMask{context.is_real_token}) : (*mlp)(x);
}

at::Tensor DecoderLayer::forward(const at::Tensor& x, const LayerContext& context) {
  const nn::AttentionContext& attention = context;
  const auto attended = x + (*self_attn)((*input_layernorm)(x), attention);
  return attended + feed_forward((*post_attention_layernorm)(attended), context);
}

DecoderLayers::DecoderLayers(int64_t count, const std::function<std::shared_ptr<DecoderLayer>(int64_t layer)>& make) {
  list.resize(static_cast<size_t>(count));
  for (int64_t layer = 0; layer < count; ++layer) {
    register_module(std::to_string(layer), list[static_cast<size_t>(layer)], make(layer));
  }
}

std::vector<std::shared_ptr<nn::Module>> DecoderLayers::present() const {
  std::vector<std::shared_ptr<nn::Module>> out;
  std::copy_if(list.begin(), list.end(), std::back_inserter(out), [](const auto& layer) { return layer != nullptr; });
  return out;
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

DecoderModel::Sequence DecoderModel::context_parallel_sequence(const ModelInputs& inputs) const {
  // In a paged step (with a paged KV cache) every rank computes the tokens of all sequences, so the tokens are not
  // sharded over the context-parallel group.
  if (!context_ || inputs.paged != nullptr) return nullptr;
  TESSERA_CHECK(
      inputs.logits_to_keep == 0, ErrorKind::kConfig,
      "[models.forward] logits_to_keep ({}) in a model that is context parallel over {} ranks: no rank has whole "
      "rows. Use a paged step, in which every rank has whole rows, or slice the logits.",
      inputs.logits_to_keep, context_->group->size());
  return nn::context_sequence(
      *context_, {.rows = inputs.tokens.size(0), .tokens = inputs.tokens.size(1), .document_ids = inputs.document_ids});
}

nn::AttentionPattern DecoderModel::pattern(const ModelInputs& inputs, const at::Tensor& x, bool sliding,
                                           const Sequence& sequence) const {
  if (inputs.paged) return {.sliding_window = sliding ? config_.sliding_window : 0};
  // Flash attention by document lengths supports only some head sizes and no softcap.
  const bool by_lengths = kernels::supports_flash_head_dim(config_.head_dim) && config_.attn_logit_softcapping == 0;
  return nn::attention_pattern({.rows = inputs.tokens.size(0),
                                .tokens = inputs.tokens.size(1),
                                .document_ids = inputs.document_ids,
                                .sliding_window = sliding ? config_.sliding_window : 0,
                                .context = sequence,
                                .fixed_sizes = by_lengths ? room_.get() : nullptr},
                               x.options());
}

// Runs the layers of one stage. All full-attention layers share one set of rotary angles and one attention pattern, and
// so do all sliding-window layers. Both sets are computed once per forward.
at::Tensor DecoderModel::forward(const ModelInputs& inputs) {
  const auto stage = inputs.stage.value_or(StageRange{.end_layer = static_cast<int64_t>(layers->list.size())});
  auto x = stage.is_first ? (*embed_tokens)(inputs.tokens) : inputs.hidden;
  const auto sequence = context_parallel_sequence(inputs);
  const bool over_ranks = sequence || nn::ContextParallelGuard::current() != nullptr;
  TESSERA_CHECK(!over_ranks || !config_.has_dynamic_rope(), ErrorKind::kConfig,
                "[models.forward] rope_scaling dynamic under context parallelism: its angles depend on the longest "
                "position of a row, and a rank has only a part of the row. Use another rope_type, or no context "
                "parallelism.");
  auto positions = inputs.positions;
  if (!positions.defined()) {
    const auto* scope = nn::ContextParallelGuard::current();
    positions = sequence ? sequence->positions()
                : scope  ? scope->positions()
                         : at::arange(inputs.tokens.size(1), inputs.tokens.options());
    positions = positions.to(inputs.tokens.device()).unsqueeze(0);
  }
  const auto angles_of = [&](RotaryEmbedding& rotary) {
    const auto& lengths = inputs.rotary_lengths;
    return lengths.defined() ? rotary.forward_by_lengths(x, positions, lengths) : rotary(x, positions);
  };
  const auto angles = angles_of(*rotary_emb);
  const auto local_angles = rotary_emb_local ? angles_of(*rotary_emb_local) : angles;
  // All full-attention layers share one LayerContext, and all sliding-window layers share another one. Each
  // LayerContext is made just before the first layer that needs it.
  std::optional<LayerContext> full, sliding;
  for (int64_t i = stage.first_layer; i < stage.end_layer; ++i) {
    const bool slides = config_.sliding_window_of_layer(i) > 0;
    auto& context = slides ? sliding : full;
    if (!context) {
      context = LayerContext{{slides ? local_angles : angles, pattern(inputs, x, slides, sequence), inputs.paged}};
      if (config_.experts.num_experts > 0 && inputs.document_ids.defined()) {
        context->is_real_token = to_device_async(x.device(), inputs.document_ids.ge(0));
      }
    }
    x = (*layers->list[static_cast<size_t>(i)])(x, *context);
  }
  return stage.is_last ? (*norm)(x) : x;
}

std::shared_ptr<nn::Head> make_head(const ModelConfig& config, const nn::Embedding& embedding,
                                    const nn::ParameterOptions& options) {
  // A tied head is made on the meta device, and set_parameter() then replaces its weight by the embedding's weight.
  const nn::ParameterOptions head_options{options.dtype,
                                          config.tie_word_embeddings ? at::Device(at::kMeta) : options.device};
  auto head =
      std::make_shared<nn::Head>(config.hidden_size, config.vocab_size, head_options, config.final_logit_softcapping);
  if (config.tie_word_embeddings) nn::Module::set_parameter(head->own_parameters().front(), embedding.weight);
  return head;
}

namespace {

// On a pipeline rank, the modules of other stages are null. This check reports a missing module before forward would
// dereference the null pointer.
void check_stage(const DecoderModel& model, const nn::Head* head, const ModelInputs& inputs) {
  const auto count = static_cast<int64_t>(model.layers->list.size());
  const auto stage = inputs.stage.value_or(StageRange{.end_layer = count});
  bool has_stage = 0 <= stage.first_layer && stage.first_layer <= stage.end_layer && stage.end_layer <= count &&
                   (!stage.is_first || model.embed_tokens) && (!stage.is_last || (model.norm && head != nullptr));
  for (int64_t layer = stage.first_layer; has_stage && layer < stage.end_layer; ++layer) {
    has_stage = model.layers->list[static_cast<size_t>(layer)] != nullptr;
  }
  TESSERA_CHECK(has_stage, ErrorKind::kConfig,
                "[models.forward] layers {} to {} of {}{}{}: this pipeline rank does not have all of these. Set "
                "ModelInputs::stage to one of its stages.",
                stage.first_layer, stage.end_layer, count, stage.is_first ? ", the embedding" : "",
                stage.is_last ? ", norm and head" : "");
  if (stage.is_first) return;
  const auto& hidden = inputs.hidden;
  TESSERA_CHECK(
      hidden.defined() && hidden.dim() == 3 && hidden.size(0) == inputs.tokens.size(0) &&
          hidden.size(1) == inputs.tokens.size(1),
      ErrorKind::kShape,
      "[models.forward] hidden: a stage that is not the first needs the output of the previous stage, [{}, {}, "
      "hidden_size] for these tokens",
      inputs.tokens.size(0), inputs.tokens.size(1));
}

}  // namespace

// The head gets only the rows of the hidden states that the result needs: in a paged step the rows that
// select_logit_rows() returns, with logits_to_keep the rows of the last tokens. With labels or targets the head gets
// all rows, and processes them in chunks.
at::Tensor run_decoder(DecoderModel& model, nn::Head* head_of_model, const ModelInputs& inputs) {
  TESSERA_CHECK(inputs.tokens.defined() && inputs.tokens.dim() == 2 && inputs.tokens.scalar_type() == at::kLong &&
                    inputs.tokens.numel() > 0,
                ErrorKind::kShape, "[models.forward] tokens: wanted int64 [B, T] with at least one token");
  check_stage(model, head_of_model, inputs);
  const auto hidden = model(inputs);
  if (inputs.stage && !inputs.stage->is_last) return hidden;
  auto& head = *head_of_model;
  if (inputs.labels.defined()) return head(hidden, inputs.labels);
  if (inputs.targets.defined()) return head(hidden, nn::TokenTargets{inputs.targets});
  if (inputs.paged) return head(inputs.paged->select_logit_rows(hidden));
  const int64_t length = hidden.size(1), kept = inputs.logits_to_keep;
  return head(kept > 0 && kept < length ? hidden.narrow(1, length - kept, kept) : hidden);
}

DecoderForCausalLM::DecoderForCausalLM(const ModelConfig& config, const DecoderParts& parts,
                                       const nn::ParameterOptions& options)
    : CausalLM(config) {
  register_module("model", model, std::make_shared<DecoderModel>(config, parts, options));
  register_module("lm_head", lm_head, make_head(config, *model->embed_tokens, options));
}

at::Tensor DecoderForCausalLM::forward(const ModelInputs& inputs) { return run_decoder(*model, lm_head.get(), inputs); }

std::vector<std::shared_ptr<nn::Module>> DecoderForCausalLM::blocks() { return model->layers->present(); }

}  // namespace tessera
