// The parts that the decoders of all families share, with the names of transformers: model (embed_tokens, layers, norm,
// rotary_emb) and lm_head. A family sets in DecoderParts the parts in which it differs from Llama.
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

// Return the attention options of layer `layer` and the expert options, from config.json.
nn::AttentionOptions attention_options(const ModelConfig& config, int64_t layer);
nn::MoEOptions moe_options(const ModelConfig& config);

// The inputs that all layers of a forward pass share.
struct LayerContext : nn::AttentionContext {
  at::Tensor is_real_token{};  // bool [B, T]: false for padding, which router statistics skip; undefined: no padding

  // Passes the tensors that a layer reads from this context to `visit`; nn::collect_read_tensors() calls it.
  template <class F>
  void visit_read_tensors(F&& visit) {
    angles.visit_tensors(visit);
    if (pattern.documents.begins.defined()) visit(pattern.documents.begins);
    if (is_real_token.defined()) visit(is_real_token);
  }
  // Returns the numbers, besides tensors, on which a layer's kernels depend. A call with equal numbers and shapes can
  // be replayed from a CUDA graph. Returns nullopt for calls that cannot be replayed: with a KV cache, with tokens that
  // are sharded over ranks, and with document lists that are not padded (nn::FixedDocumentSizes).
  std::optional<std::vector<int64_t>> read_numbers() const;
};

// A decoder layer: attention, then an MLP or experts. Before each of the two is a norm, and around each (with its norm)
// is a residual connection.
struct DecoderLayer : nn::Callable<DecoderLayer> {
  std::shared_ptr<nn::Attention> self_attn;
  std::shared_ptr<nn::MLP> mlp;
  // Used in place of `mlp` when the config gives this layer experts; registered under the name "mlp", too.
  std::shared_ptr<nn::MoE> moe;
  std::shared_ptr<nn::RMSNorm> input_layernorm, post_attention_layernorm;
  DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config, const nn::ParameterOptions& options,
               const nn::NormOptions& norm);
  DecoderLayer(const nn::AttentionOptions& attention, const ModelConfig& config, const nn::ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x, const LayerContext& context);

 protected:
  // Applies the MLP or the experts.
  at::Tensor feed_forward(const at::Tensor& x, const LayerContext& context);
};

// A list of modules named "0", "1", ... An entry is null when replace_child has removed the layer because another
// pipeline rank has it.
struct DecoderLayers : nn::Module {
  std::vector<std::shared_ptr<DecoderLayer>> list;
  DecoderLayers(int64_t count, const std::function<std::shared_ptr<DecoderLayer>(int64_t layer)>& make);
  std::vector<std::shared_ptr<nn::Module>> present() const;
};

struct DecoderParts {
  std::function<std::shared_ptr<DecoderLayer>(int64_t layer)> layer{};
  std::optional<nn::NormOptions> norm{};  // the final norm; nullopt: a plain norm with the config's epsilon
  double embedding_scale = 1;
};

// The decoder without head. embed_tokens, norm and entries of layers are null if they are in stages of other ranks.
// rotary_emb computes the angles of the full-attention layers. If the config has separate rope settings for
// sliding-window layers, rotary_emb_local computes the angles of these layers, else rotary_emb does.
struct DecoderModel : nn::Callable<DecoderModel> {
  std::shared_ptr<nn::Embedding> embed_tokens;
  std::shared_ptr<DecoderLayers> layers;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<RotaryEmbedding> rotary_emb, rotary_emb_local;
  DecoderModel(const ModelConfig& config, const DecoderParts& parts, const nn::ParameterOptions& options);
  virtual at::Tensor forward(const ModelInputs& inputs);  // [B, T, hidden]
  // Sets context parallelism for later calls (apply_context_parallel). The inputs of forward are then this rank's shard
  // of each row, in the layout of kernels::ContextLayout. If positions are undefined, forward uses the shard's
  // positions in the unsharded row. forward is COLLECTIVE over the group and throws kConfig for logits_to_keep. Neither
  // is so in a paged step, which is not sharded: its inputs are whole rows, equal on all ranks, and each rank computes
  // all tokens.
  void set_context_parallelism(nn::ContextParallelGroup parallelism) { context_ = std::move(parallelism); }
  // Pads the document lists of later calls to fixed sizes (nn::FixedDocumentSizes), if the device's attention kernels
  // read document lengths. The shapes are then equal in all batches, so that layers can be captured as CUDA graphs
  // (nn::ForwardCall).
  void pad_document_lists() { room_ = std::make_unique<nn::FixedDocumentSizes>(); }

 private:
  using Sequence = std::shared_ptr<const nn::ContextSequence>;
  Sequence context_parallel_sequence(const ModelInputs& inputs) const;  // null when tokens are not sharded
  nn::AttentionPattern pattern(const ModelInputs& inputs, const at::Tensor& x, bool sliding,
                               const Sequence& sequence) const;
  ModelConfig config_;
  std::optional<nn::ContextParallelGroup> context_;
  std::unique_ptr<nn::FixedDocumentSizes> room_;  // null: document lists are not padded
};

// Makes the lm_head for the config. With tie_word_embeddings it allocates nothing: the head's weight is the embedding's
// weight.
std::shared_ptr<nn::Head> make_head(const ModelConfig& config, const nn::Embedding& embedding,
                                    const nn::ParameterOptions& options);
// Implements CausalLM::forward. The head may be null unless inputs.stage is the last stage. Errors: kShape for tokens
// that are not int64 [B, T] and for hidden states that are not [B, T, hidden_size]; kConfig for a stage that is not on
// this rank.
at::Tensor run_decoder(DecoderModel& model, nn::Head* head, const ModelInputs& inputs);

class DecoderForCausalLM : public CausalLM {
 public:
  std::shared_ptr<DecoderModel> model;
  std::shared_ptr<nn::Head> lm_head;
  DecoderForCausalLM(const ModelConfig& config, const DecoderParts& parts, const nn::ParameterOptions& options);
  at::Tensor forward(const ModelInputs& inputs) override;
  std::vector<std::shared_ptr<nn::Module>> blocks() override;
};

}  // namespace tessera
