// Scaled dot product attention whose result selective activation checkpointing keeps
// (kernels/autograd/activation_checkpoint_cache.h).
//
//   if (kernels::caches_attention(q)) return kernels::checkpointed_attention(q, k, v, {.causal = true});
//
// The semantics are those of at::scaled_dot_product_attention. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::kernels {

struct CheckpointedAttentionOptions {
  bool causal = false;
  std::optional<at::Tensor> mask = std::nullopt;  // added to the scores; gets no gradient
  std::optional<double> scale = std::nullopt;
};

// Returns whether an ActivationCheckpointCache::Scope is active on this thread and q is a plain tensor on the CPU.
bool caches_attention(const at::Tensor& q);
// q [B, H, T, d]; k and v [B, G, S, d], H a multiple of G. The first forward computes the result and keeps it; the
// recomputation in backward returns the kept result.
at::Tensor checkpointed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const CheckpointedAttentionOptions& options);

}  // namespace tessera::kernels
