// Causal attention with a first visible key per token, for packed documents and sliding windows.
//
//   if (kernels::supports_causal_attention_loops(q, k, v)) {
//     y = kernels::causal_attention(q, k, v, {.first_key = first});
//   }
//
// A token at position t of a row sees the keys [first_key[t], t] of that row. A token with first_key[t] > t sees no key
// and gets zeros. Forward and backward skip each block of keys that no query of a block of queries sees. Memory is
// linear in the number of tokens. The result does not depend on the number of threads. Inside selective activation
// checkpointing the result is kept (kernels/autograd/activation_checkpoint_cache.h).
//
// The function is an operation of the dispatcher (tessera::causal_attention) with a first derivative, without a second
// derivative. DTensors: the batch dim may be sharded; the head dim may be sharded where the mesh dim's size divides
// both H (query heads) and G (key and value heads). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::kernels {

struct CausalAttentionOptions {
  at::Tensor first_key = {};         // int64 [B, T] on the CPU, a plain tensor, the same on all ranks; undefined: 0
  std::optional<double> scale = {};  // nullopt: 1 / sqrt(d)
};

// Returns whether the blocked loops support these tensors: a CPU with AVX2 or AVX-512; fp32 or bf16; d a multiple of 16
// up to 256; as many keys as queries. For other tensors causal_attention holds all scores [T, T] of a head in memory.
bool supports_causal_attention_loops(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
// q [B, H, T, d]; k and v [B, G, T, d], H a multiple of G. Returns [B, H, T, d] whose memory layout is [B, T, H, d].
// Error kShape for other shapes.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options = {});

}  // namespace tessera::kernels
