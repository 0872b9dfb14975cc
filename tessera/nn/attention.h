// Causal self-attention with grouped key-value heads and rotary positions.
//
//   nn::AttentionContext context{.cos = cos, .sin = sin};
//   context.mask = attention_mask(document_ids, tokens, cached, window, x.options());   // undefined: plain causal
//   at::Tensor y = attention(x, context);                                               // x [B, T, width]
//
// The context is made once a forward and shared by all layers.
#pragma once

#include <cstdint>

#include "tessera/nn/kv_cache.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

struct AttentionContext {
  at::Tensor cos{}, sin{};   // fp32 [B or 1, T, head_dim / 2]
  at::Tensor mask{};         // added to the scores, [B or 1, 1, T, T + cached]; undefined: see causal
  bool causal = true;        // without a mask: each token sees those before it, else all
  KvCache* cache = nullptr;  // keys and values of earlier tokens; not owned
};

struct AttentionMaskOptions {
  int64_t rows = 1;
  int64_t tokens = 0;          // of each row in this call
  int64_t cached = 0;          // tokens before them in the cache
  int64_t sliding_window = 0;  // a token sees itself and window - 1 before it; 0: all before it
};

// What forbids attention across documents, to later tokens and beyond the window, as zeros and minus infinities in
// `options`' dtype; undefined where "causal" (or, for one token, "everything") says it all. document_ids int64 [B, T]
// tells the documents of a packed row apart; undefined: one document a row. Documents and a cache together are Error kShape.
at::Tensor attention_mask(const at::Tensor& document_ids, const AttentionMaskOptions& mask, const at::TensorOptions& options);

struct AttentionOptions {
  int64_t width = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool qkv_bias = false;
  bool output_bias = false;
  int64_t layer = 0;  // its place in the cache
};

// q_proj, k_proj, v_proj, o_proj.
struct Attention : Callable<Attention> {
  std::shared_ptr<Linear> q_proj, k_proj, v_proj, o_proj;
  Attention(const AttentionOptions& attention, const ParameterOptions& options);
  at::Tensor forward(const at::Tensor& x, const AttentionContext& context);

 private:
  AttentionOptions attention_;
};

}  // namespace tessera::nn
