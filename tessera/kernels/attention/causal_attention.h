// Causal attention in which each token sees its own document, or the window before it, and nothing else is computed.
//
//   if (kernels::runs_causal_attention(q, k, v)) y = kernels::causal_attention(q, k, v, {.first_key = first});
//
// A token at position t of a row sees the keys [first_key[t], t] of that row; none where first_key[t] > t, which gives
// zeros. Blocks of keys that no query of a block sees are skipped, forward and backward; memory is linear in the
// tokens. The number of threads does not show in the result. Results are kept where kept_results.h says so. An
// operation of the dispatcher (tessera::causal_attention), with a derivative but no second one. DTensors: rows may be
// sharded, and heads where their numbers divide evenly. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::kernels {

struct CausalAttentionOptions {
  at::Tensor first_key = {};         // int64 [B, T] on the CPU, plain and alike on all ranks; undefined: 0
  std::optional<double> scale = {};  // none: one over the square root of the head's size
};

// Whether the loops for it run here: on a CPU with AVX2 or AVX-512, on fp32 or bf16 heads of a multiple of 16 up to
// 256, as many keys as queries. Elsewhere causal_attention has all scores of a head in memory at once.
bool runs_causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
// q [B, H, T, d]; k and v [B, G, T, d], H a multiple of G: [B, H, T, d], in memory [B, T, H, d]. Error kShape.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options = {});

}  // namespace tessera::kernels
