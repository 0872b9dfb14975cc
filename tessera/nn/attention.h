// Causal self-attention with grouped key-value heads and rotary positions.
//
//   nn::AttentionContext context{.cos = cos, .sin = sin};
//   context.pattern = attention_pattern({.rows = B, .tokens = T, .document_ids = ids}, x.options());
//   at::Tensor y = attention(x, context);                                               // x [B, T, width]
//
// The context is made once a forward and shared by all layers.
#pragma once

#include <cstdint>

#include "tessera/nn/attention_pattern.h"
#include "tessera/nn/kv_cache.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

struct AttentionContext {
  at::Tensor cos{}, sin{};     // fp32 [B or 1, T, head_dim / 2]
  AttentionPattern pattern{};  // of itself: one document a row
  KvCache* cache = nullptr;    // keys and values of earlier tokens; not owned
};

struct AttentionOptions {
  int64_t width = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool qkv_bias = false;
  bool output_bias = false;
  int64_t layer = 0;  // its place in the cache
};

// q_proj, k_proj, v_proj, o_proj. The numbers of heads are those that the projections give: a part of all where those
// are sharded and give their own part.
struct Attention : Callable<Attention> {
  std::shared_ptr<Linear> q_proj, k_proj, v_proj, o_proj;
  Attention(const AttentionOptions& attention, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x, const AttentionContext& context);

 private:
  AttentionOptions attention_;
};

}  // namespace tessera::nn
