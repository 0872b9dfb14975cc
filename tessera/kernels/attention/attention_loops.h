// Causal attention of plain CPU tensors by our own loops: scores of blocks of queries by blocks of keys, never all of
// them, and none for blocks of keys that no query of a block sees.
//
// A token at position t of a row sees the keys [first_key[t], t] of that row; none where first_key[t] > t (padding),
// whose result and gradients are zero. fp32 and bf16 tensors, computed in fp32. What threads there are does not show in
// the result. No autograd, no DTensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::kernels {

// Whether this processor has what the loops are written for (AVX-512 or AVX2).
bool has_attention_loops();

struct CausalAttention {
  const at::Tensor &q, &k, &v;  // [B, H, T, d], [B, G, T, d] twice: G divides H, d a multiple of 16 up to 256
  const at::Tensor& first_key;  // int64 [B, T], contiguous; undefined: 0 everywhere
  double scale = 1;
};

// The result [B, H, T, d], whose memory is that of [B, T, H, d], and the fp32 logarithms of the sums of exponentials
// [B, H, T].
std::tuple<at::Tensor, at::Tensor> attention_forward_loops(const CausalAttention& call);
// The gradients of q, k and v, which lie as the result does.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_loops(const CausalAttention& call,
                                                                        const at::Tensor& grad,
                                                                        const at::Tensor& log_sums);

}  // namespace tessera::kernels
