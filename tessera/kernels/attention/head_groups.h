// Grouped-query attention: repeats keys and values for the query heads of their group, and sums gradients back.
//
//   at::Tensor keys = repeat_heads(k, /*dim=*/1, 8);         // [B, 2, S, d] -> [B, 8, S, d]
//   at::Tensor grad_k = sum_heads(grad_keys, /*dim=*/1, 2);  // [B, 8, S, d] -> [B, 2, S, d]
//
// Head h uses the keys and values of group h / (heads / groups). Both functions return the tensor itself where the
// sizes are equal. Differentiable, for DTensors too. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::kernels {

// Repeats the groups in dim `dim` (negative: from the end) to `heads` heads, a multiple of the groups.
at::Tensor repeat_heads(const at::Tensor& tensor, int64_t dim, int64_t heads);
// Sums the gradients of the heads of each group, in float32 (float64 for float64).
at::Tensor sum_heads(const at::Tensor& tensor, int64_t dim, int64_t groups);

}  // namespace tessera::kernels
