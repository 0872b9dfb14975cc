// What the decoders of all families have in common, with the names of transformers: model (embed_tokens, layers, norm,
// rotary_emb) and lm_head. A family says in DecoderParts what it makes otherwise than Llama.
//
//   DecoderForCausalLM model(config, {.layer = [&](int64_t layer) {
//     return std::make_shared<DecoderLayer>(attention_options(config, layer), config, options);
//   }}, options);
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/models/config/rope.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/nn/attention/attention.h"
#include "tessera/nn/attention/context_attention.h"
#include "tessera/nn/experts/moe.h"
#include "tessera/nn/layers.h"

namespace tessera {

// Of the layer, as config.json has it.
nn::AttentionOptions attention_options(const ModelConfig& config, int64_t layer);
nn::MoEOptions moe_options(const ModelConfig& config);

// What the layers of a forward share.
struct LayerContext : nn::AttentionContext {
  at::Tensor real{};  // bool [B, T]: tokens that are no padding, for the statistics of routers; undefined: all

  // For nn::ForwardCall.
  template <class F>
  void visit_read_tensors(F&& visit) {
    angles.visit_tensors(visit);
    if (pattern.documents.begins.defined()) visit(pattern.documents.begins);
    if (real.defined()) visit(real);
  }
  // None with a cache, with tokens over ranks, and for documents without room (nn::DocumentRoom).
  std::optional<std::vector<int64_t>> read_numbers() const;
};

// Attention and MLP, or experts, each behind a norm and around a residual.
struct DecoderLayer : nn::Callable<DecoderLayer> {
  std::shared_ptr<nn::Attention> self_attn;
  std::shared_ptr<nn::MLP> mlp;
  std::shared_ptr<nn::MoE> moe;  // in place of mlp, and the child of that name, where the config says so
  std::shared_ptr<nn::RMSNorm> input_layernorm, post_attention_layernorm;
  DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config, const nn::ParameterOptions& options,
               const nn::NormOptions& norm);
  DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config, const nn::ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x, const LayerContext& context);

 protected:
  // The MLP or the experts.
  at::Tensor feed_forward(const at::Tensor& x, const LayerContext& context);
};

// A list of modules named "0", "1", ...; null where replace_child has taken one away, which other ranks of a pipeline
// have.
struct DecoderLayers : nn::Module {
  std::vector<std::shared_ptr<DecoderLayer>> list;
  DecoderLayers(int64_t count, const std::function<std::shared_ptr<DecoderLayer>(int64_t layer)>& make);
  std::vector<std::shared_ptr<nn::Module>> present() const;
};

struct DecoderParts {
  std::function<std::shared_ptr<DecoderLayer>(int64_t layer)> layer{};
  std::optional<nn::NormOptions> norm{};  // the last one; none: plain, with the config's epsilon
  double embedding_scale = 1;
};

// Null where they are not of this rank's stages: layers, embed_tokens, norm. rotary_emb turns the layers that see
// everything, and the sliding ones unless the config gives them angles of their
// own: those are of rotary_emb_local.
struct DecoderModel : nn::Callable<DecoderModel> {
  std::shared_ptr<nn::Embedding> embed_tokens;
  std::shared_ptr<DecoderLayers> layers;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<RotaryEmbedding> rotary_emb, rotary_emb_local;
  DecoderModel(const ModelConfig& config, const DecoderParts& parts, const nn::ParameterOptions& options);
  virtual at::Tensor forward(const ModelInputs& inputs);  // [B, T, hidden]
  // From now on inputs are this rank's tokens of rows that lie over the group as kernels::ContextLayout cuts them,
  // positions undefined for those of the whole rows, and forward is COLLECTIVE over it (apply_context_parallel). In a
  // paged step inputs are whole rows, alike on all ranks, each of which computes all of them. Error kConfig:
  // logits_to_keep outside of one.
  void set_context_parallelism(nn::ContextParallelism how) { context_ = std::move(how); }
  // From now on documents have room where the device's attention goes by their lengths, so that layers repeat from
  // batch to batch (nn::ForwardCall).
  void make_documents_repeat() { room_ = std::make_unique<nn::DocumentRoom>(); }

 private:
  using Sequence = std::shared_ptr<const nn::ContextSequence>;
  Sequence sequence_over_ranks(const ModelInputs& inputs) const;  // null where tokens are not cut
  nn::AttentionPattern pattern(const ModelInputs& inputs, const at::Tensor& x, bool sliding,
                               const Sequence& sequence) const;
  ModelConfig config_;
  std::optional<nn::ContextParallelism> context_;
  std::unique_ptr<nn::DocumentRoom> room_;  // null: none
};

// The head of the config: tied, it allocates nothing and its slot shows the embedding's weight.
std::shared_ptr<nn::Head> make_head(const ModelConfig& config, const nn::Embedding& embedding,
                                    const nn::ParameterOptions& options);
// What CausalLM::forward gives; the head may be null where no last stage is run. Errors kShape: tokens that are no
// int64 [B, T], hidden states that are not [B, T, hidden_size]; kConfig: a stage that this rank has not.
at::Tensor decode(DecoderModel& model, nn::Head* head, const ModelInputs& inputs);

class DecoderForCausalLM : public CausalLM {
 public:
  std::shared_ptr<DecoderModel> model;
  std::shared_ptr<nn::Head> lm_head;
  DecoderForCausalLM(const ModelConfig& config, const DecoderParts& parts, const nn::ParameterOptions& options);
  at::Tensor forward(const ModelInputs& inputs) override;
  std::vector<std::shared_ptr<nn::Module>> blocks() override;
};

}  // namespace tessera
