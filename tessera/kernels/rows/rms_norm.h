// Root mean square normalisation over the last dim.
//
//   at::Tensor y = rms_norm(x, weight, 1e-5);    // x [..., d], weight [d]
//
// The default matches LlamaRMSNorm of transformers: statistics and scaling in fp32, the product with the weight in the
// dtype of x. one_plus matches Gemma3RMSNorm: the product is with 1 + weight, in fp32, rounded at the end.
//
// Where libtorch has its own kernel for the device (CUDA, XPU) and x and weight have the same dtype, that kernel runs:
// one launch forward and one backward, and the product is rounded once. It does not run for one_plus in 16 bits; on
// CUDA these tensors use Tessera's own kernel in builds with nvcc.
//
// Saves x, weight and one fp32 per row for the backward. A double backward runs plain operations. DTensors: any dim but
// the last may be sharded (operations tessera::rms_norm, tessera::rms_norm_backward). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool one_plus = false);

}  // namespace tessera::kernels
