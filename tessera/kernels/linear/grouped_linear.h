// One matrix product for each group of rows (a grouped GEMM): the experts of an MoE layer apply their weights to the
// tokens that the router sent to them.
//
//   at::Tensor y = grouped_linear(x, weight, counts);     // x [M, in], weight [E, out, in]: [M, out]
//
// counts: int64 [E] on the CPU, the number of rows of each group. The groups follow one another in x, and the counts
// add up to M. A group may be empty: the gradient of its weight is zero. Large groups run the product that
// tessera::linear selects, other groups run at::mm. Any device, in the dtype of x. First and second derivatives. Plain
// tensors only. Error kShape for sizes that do not fit. Thread-safe. No communication.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts);

}  // namespace tessera::kernels
