// Causal self-attention with grouped key-value heads and rotary positions.
//
//   nn::AttentionContext context{.angles = rotary_emb(x, positions)};
//   context.pattern = attention_pattern({.rows = B, .tokens = T, .document_ids = ids}, x.options());
//   at::Tensor y = attention(x, context);                                               // x [B, T, width]
//
// The context is made once a forward and shared by all layers that see alike.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/paged_cache.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

// What a rotary embedding gives: fp32 [B or 1, T, head_dim / 2].
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
  AttentionPattern pattern{};  // of itself: one document a row
  PagedStep* paged = nullptr;  // tokens of several sequences in one row, with the pages of earlier ones; not owned
};

struct AttentionOptions {
  int64_t width = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool qkv_bias = false;
  bool output_bias = false;
  std::optional<NormOptions>
      qk_norm{};  // q_norm and k_norm over each head of queries and keys, before they are rotated
  AttentionScores scores{};
  int64_t layer = 0;  // its place in a page
};

// q_proj, k_proj, v_proj, o_proj, where asked for q_norm and k_norm, which see [B, T, heads, head_dim]. The numbers of
// heads are those that the projections give: a part of all where those are sharded and give their own part.
struct Attention : Callable<Attention> {
  std::shared_ptr<Linear> q_proj, k_proj, v_proj, o_proj;
  std::shared_ptr<RMSNorm> q_norm, k_norm;  // null where there are none
  Attention(const AttentionOptions& attention, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x, const AttentionContext& context);
  const AttentionOptions& options() const { return attention_; }

 protected:
  // What follows the projections, before o_proj: [B, T, heads * head_dim] of q, k and v of such shapes.
  at::Tensor attend_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionContext& context);

 private:
  AttentionOptions attention_;
};

}  // namespace tessera::nn
