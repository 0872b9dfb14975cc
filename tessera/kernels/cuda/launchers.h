// Launchers of Tessera's CUDA kernels. They take raw pointers, because nvcc does not compile libtorch's headers
// (rows/cuda_elementwise_kernels.h has the functions on tensors). A launcher returns the error of the launch before its
// kernel has run; memory must stay allocated until the kernel has run on `stream`. Sizes are 64-bit and at least 1.
// Sums are fp32 in a fixed order, without atomics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::kernels::cuda {

enum class ElementType { kFloat, kBFloat16 };

// Computes y = activation(gate) * up. The activation (silu, or gelu in its tanh form) is rounded before the product.
cudaError_t launch_gate(ElementType element, bool gelu, const void* gate, const void* up, void* y, int64_t count,
                        cudaStream_t stream);
cudaError_t launch_gate_backward(ElementType element, bool gelu, const void* grad, const void* gate, const void* up,
                                 void* grad_gate, void* grad_up, int64_t count, cudaStream_t stream);

// x, y [rows, width]; factors fp32 [width]; inverse_rms fp32 [rows]. rounds_first: normed rows are rounded to their
// dtype before the product with factors.
cudaError_t launch_rms_norm(ElementType element, const void* x, const float* factors, float eps, bool rounds_first,
                            void* y, float* inverse_rms, int64_t rows, int64_t width, cudaStream_t stream);
// Each thread block of launch_rms_norm_backward() writes one row of `partial`, fp32 [rms_norm_blocks(rows), width]. The
// sum of these rows is the gradient of `factors`, which the normed rows were multiplied by. rms_norm_blocks() returns
// the number of thread blocks.
int64_t rms_norm_blocks(int64_t rows);
cudaError_t launch_rms_norm_backward(ElementType element, const void* grad, const void* x, const float* factors,
                                     const float* inverse_rms, void* grad_x, float* partial, int64_t rows,
                                     int64_t width, cudaStream_t stream);

// x, y [rows, tokens, heads, 2 half]; cos, sin fp32 [rows or 1, tokens, half]. angle_row: elements of cos from one row
// to the next, 0 where all rows share the angles. heads * half fits in 31 bits.
cudaError_t launch_rotary(ElementType element, const void* x, const float* cos, const float* sin, float sign, void* y,
                          int64_t rows, int64_t tokens, int64_t heads, int64_t half, int64_t angle_row,
                          cudaStream_t stream);

// Same contract as ElementwiseKernels::cross_entropy in rows/elementwise_kernels.h.
cudaError_t launch_cross_entropy(float* logits, const int64_t* labels, int64_t ignored_label, bool wants_gradient,
                                 float* losses, int64_t rows, int64_t classes, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
