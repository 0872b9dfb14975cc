// Runs attention on DTensors whose heads or rows are sharded, on each rank's local tensors.
//
//   if (has_local_heads(q, k, v)) y = run_on_local_heads(q, k, v, [&](auto& q, auto& k, auto& v) { return ...; });
//
// No communication. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera::nn {

// Returns whether q, k and v [B, heads, T, d] are DTensors with equal placements that shard only rows (dim 0) or heads
// (dim 1).
bool has_local_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
// Runs `attend` on the local tensors. Returns a DTensor of the shape of q; its memory layout is [B, T, heads, d].
at::Tensor run_on_local_heads(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>& attend);

}  // namespace tessera::nn
