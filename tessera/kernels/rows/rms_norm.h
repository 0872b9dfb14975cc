// Root mean square normalisation over the last dim, as LlamaRMSNorm of transformers: statistics and scaling in fp32,
// the product with the weight in the input's dtype. With one_plus as Gemma3RMSNorm: the product is with 1 + weight and
// in fp32, rounded at the end. Where libtorch has a kernel of its own for the device (CUDA, XPU), that runs on weights
// of the input's dtype, but not with one_plus in 16 bits: a launch each way, and the product is rounded once. For these
// CUDA has the CPU's loop as a kernel of our own, in builds with nvcc.
//
//   at::Tensor y = rms_norm(x, weight, 1e-5);    // x [..., d], weight [d]
//
// Keeps x, weight and one fp32 a row for the backward; has no second derivative. DTensors: computed as x lies where its
// last dim is whole (tessera::rms_norm, tessera::rms_norm_backward). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool one_plus = false);

}  // namespace tessera::kernels
