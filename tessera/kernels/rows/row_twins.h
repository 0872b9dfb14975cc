// The loops of detail/row_loops.h on tensors of CUDA: the same arguments, roundings and results, on the current stream
// of their device. Sums have one order, whatever the GPU, but another one than the CPU's.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "tessera/kernels/rows/row_loops.h"

namespace tessera::kernels::cuda {

// Whether this build has them, for tensors of that type. Without them, calling one is an error.
bool has_row_twins(at::ScalarType type);

at::Tensor gate(Gate kind, const at::Tensor& gate, const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor> gate_backward(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                 const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& factors, double eps,
                                            bool rounds_first);
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                     const at::Tensor& factors, const at::Tensor& inverse_rms);
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign);
at::Tensor cross_entropy_rows(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient);

}  // namespace tessera::kernels::cuda
