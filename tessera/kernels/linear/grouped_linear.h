// One matrix product for each group of rows: what experts compute on the tokens that chose them.
//
//   at::Tensor y = grouped_linear(x, weight, counts);     // x [M, in], weight [E, out, in]: [M, out]
//
// counts: int64 [E] on the CPU, the rows of each group; the groups lie one after another in x and take all of its rows.
// A group may be empty: its weight gets a gradient of zeros. Large groups run as tessera::linear chooses, others as
// at::mm, on any device, in the dtype of x. Differentiable, twice too. Plain tensors. Error kShape for what does not
// fit. Thread-safe. No communication.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts);

}  // namespace tessera::kernels
