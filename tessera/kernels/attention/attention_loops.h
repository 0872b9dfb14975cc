// Causal attention of plain CPU tensors by Tessera's own loops (flash attention): scores exist for one block of queries
// and one block of keys at a time. Blocks of keys that no query of a block sees are skipped.
//
// A token at position t of a row sees the keys [first_key[t], t] of that row. A token with first_key[t] > t (padding)
// sees no key; its result and gradients are zero. fp32 and bf16 tensors, computed in fp32. The results do not depend on
// the number of threads. No autograd, no DTensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::kernels {

// Returns whether the loops can run: they need a build with GCC and a vector_level() of AVX2 or AVX-512.
bool has_attention_loops();

struct CausalAttentionCall {
  const at::Tensor &q, &k,
      &v;  // [B, H, T, d], [B, G, T, d], [B, G, T, d]: G divides H, d is a multiple of 16 up to 256
  const at::Tensor& first_key;  // int64 [B, T], contiguous; undefined: 0 everywhere
  double scale = 1;
};

// Returns the result [B, H, T, d] (memory layout [B, T, H, d]) and the log-sum-exp of the scores, fp32 [B, H, T].
std::tuple<at::Tensor, at::Tensor> attention_forward_loops(const CausalAttentionCall& call);
// Returns the gradients of q, k and v, each [B, heads, T, d] with the memory layout [B, T, heads, d].
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_loops(const CausalAttentionCall& call,
                                                                        const at::Tensor& grad,
                                                                        const at::Tensor& log_sums);

}  // namespace tessera::kernels
