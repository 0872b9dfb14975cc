// Rows in another order, each taken as often as said: how tokens are sorted by their experts, and put back.
//
//   at::Tensor inverse = inverse_permutation(order);
//   at::Tensor sorted = permute_rows(x, order, inverse, k);       // [N * k, d] of x [N, d]: row order[i] / k of x
//   at::Tensor back = permute_rows(y, inverse, order);            // y [N * k, d] as it was before sorting
//
// order is a permutation of 0 .. N * k - 1, inverse its inverse, both int64 on the device of x. The derivative gathers,
// where that of index_select adds row by row. Differentiable, twice too. Plain tensors. Thread-safe. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::kernels {

at::Tensor inverse_permutation(const at::Tensor& order);
at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse, int64_t copies = 1);

}  // namespace tessera::kernels
