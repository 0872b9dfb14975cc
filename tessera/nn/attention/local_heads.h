// Attention on DTensors whose heads or rows lie over ranks: each rank's own part of all three.
//
//   if (have_local_heads(q, k, v)) y = on_local_heads(q, k, v, [&](auto& q, auto& k, auto& v) { return ...; });
//
// No communication. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera::nn {

// q, k and v [B, heads, T, d] are DTensors that lie alike, cut in rows (dim 0), in heads (dim 1) or not at all.
bool have_local_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
// A DTensor of the shape of q, the tokens before the heads in memory; `attend` gives this rank's part of it.
at::Tensor on_local_heads(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>& attend);

}  // namespace tessera::nn
