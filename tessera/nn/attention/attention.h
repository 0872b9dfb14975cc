// Causal self-attention with grouped key-value heads and rotary positions.
//
//   nn::AttentionContext context{.angles = rotary_emb(x, positions)};
//   context.pattern = attention_pattern({.rows = B, .tokens = T, .document_ids = ids}, x.options());
//   at::Tensor y = attention(x, context);                                               // x [B, T, width]
//
// The context is made once per forward. All layers with the same sliding window share it.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/paged_cache.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

// The output of a rotary embedding: fp32 [B or 1, T, head_dim / 2].
struct RotaryAngles {
  at::Tensor cos{}, sin{};

  template <class F>
  void visit_tensors(F&& visit) {
    visit(cos);
    visit(sin);
  }
};

struct AttentionContext {
  RotaryAngles angles{};
  AttentionPattern pattern{};  // default: one document per row
  PagedBatch* paged =
      nullptr;  // for generation: tokens of several sequences in one row, with their KV pages; not owned
};

struct AttentionOptions {
  int64_t width = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool qkv_bias = false;
  bool output_bias = false;
  // RMSNorms over each head of queries and keys, before the rotary embedding; nullopt: none.
  std::optional<NormOptions> qk_norm{};
  AttentionScoreOptions scores{};
  int64_t layer = 0;  // index of the layer in the KV cache
};

// q_proj, k_proj, v_proj, o_proj, and with qk_norm also q_norm and k_norm, whose input is [B, T, heads, head_dim]. The
// number of heads is taken from the projections' outputs: with sharded projections it is this rank's heads.
struct Attention : Callable<Attention> {
  std::shared_ptr<Linear> q_proj, k_proj, v_proj, o_proj;
  std::shared_ptr<RMSNorm> q_norm, k_norm;  // null without qk_norm
  Attention(const AttentionOptions& attention, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x, const AttentionContext& context);
  const AttentionOptions& options() const { return attention_; }

 protected:
  // Applies q_norm and k_norm, rotary embedding and attention to the projected q, k and v [B, T, heads * head_dim].
  // Returns the input of o_proj, in the shape of q.
  at::Tensor attend_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionContext& context);

 private:
  AttentionOptions attention_;
};

}  // namespace tessera::nn
