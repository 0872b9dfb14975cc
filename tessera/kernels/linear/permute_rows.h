// Copies and permutes rows: sorts tokens by their experts, and brings them back to their order.
//
//   at::Tensor inverse = inverse_permutation(order);
//   at::Tensor sorted = permute_rows(x, order, inverse, k);       // [N * k, d] of x [N, d]: row order[i] / k of x
//   at::Tensor back = permute_rows(y, inverse, order);            // y [N * k, d] in the order before sorting
//
// order is a permutation of 0 .. N * k - 1, and inverse its inverse; both are int64 on the device of x. The backward
// gathers rows, while the backward of index_select adds them one by one. First and second derivatives. Plain tensors.
// Thread-safe. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::kernels {

at::Tensor inverse_permutation(const at::Tensor& order);
at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse, int64_t copies = 1);

}  // namespace tessera::kernels
