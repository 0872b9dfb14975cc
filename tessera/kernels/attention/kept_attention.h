// Scaled dot product attention whose result selective activation checkpointing keeps (kept_results.h).
//
//   if (kernels::keeps_attention(q)) return kernels::kept_attention(q, k, v, {.causal = true});
//
// Semantics of at::scaled_dot_product_attention. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::kernels {

struct KeptAttentionOptions {
  bool causal = false;
  std::optional<at::Tensor> mask = std::nullopt;  // added to the scores, no gradient
  std::optional<double> scale = std::nullopt;
};

// Whether results are kept on this thread now, and those of such queries can be: plain tensors on the CPU.
bool keeps_attention(const at::Tensor& q);
// q [B, H, T, d]; k and v [B, G, S, d], H a multiple of G. Keeps the result, or takes the one that was kept.
at::Tensor kept_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const KeptAttentionOptions& options);

}  // namespace tessera::kernels
