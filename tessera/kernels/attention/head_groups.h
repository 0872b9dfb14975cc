// Heads in groups that share keys and values: each of these for the heads of its group, and back.
//
//   at::Tensor keys = repeat_heads(k, /*dim=*/1, 8);        // [B, 2, S, d] as [B, 8, S, d]
//   at::Tensor grad_k = sum_heads(grad_keys, /*dim=*/1, 2);  // and what it sends back
//
// Head h takes what lies at h / (heads / groups). Differentiable, for DTensors too; the tensor itself where there is as
// much of it. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::kernels {

// Dim `dim` (from the end where negative) holds as many groups as it is long; `heads` is a multiple of them.
at::Tensor repeat_heads(const at::Tensor& tensor, int64_t dim, int64_t heads);
// Of gradients; added in float32 (float64 of float64).
at::Tensor sum_heads(const at::Tensor& tensor, int64_t dim, int64_t groups);

}  // namespace tessera::kernels
