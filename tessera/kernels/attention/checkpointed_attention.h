// Scaled dot product attention whose result selective activation checkpointing keeps (kernels/autograd/kept_results.h).
//
//   if (kernels::keeps_attention(q)) return kernels::kept_attention(q, k, v, {.causal = true});
//
// The semantics are those of at::scaled_dot_product_attention. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::kernels {

struct KeptAttentionOptions {
  bool causal = false;
  std::optional<at::Tensor> mask = std::nullopt;  // added to the scores; gets no gradient
  std::optional<double> scale = std::nullopt;
};

// Returns whether this thread keeps results now and q is a plain tensor on the CPU.
bool keeps_attention(const at::Tensor& q);
// q [B, H, T, d]; k and v [B, G, S, d], H a multiple of G. In the forward the result is computed and kept; in the
// recomputation the kept result is returned.
at::Tensor kept_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const KeptAttentionOptions& options);

}  // namespace tessera::kernels
