// Our own CUDA kernels on plain pointers, which is all that the compiler for CUDA sees; row_twins.h has them on
// tensors. Each launch returns before its kernel has run, with the launch's error; its memory must live until `stream`
// has come past it. Sizes are counted in 64 bits and none may be 0. Sums are fp32 and have one order: no atomics.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::kernels::cuda {

enum class Element { kFloat, kBFloat16 };

// activation(gate) * up; the activation, silu or gelu in its tanh form, is rounded before the product.
cudaError_t launch_gate(Element element, bool gelu, const void* gate, const void* up, void* y, int64_t count,
                        cudaStream_t stream);
cudaError_t launch_gate_backward(Element element, bool gelu, const void* grad, const void* gate, const void* up,
                                 void* grad_gate, void* grad_up, int64_t count, cudaStream_t stream);

// x, y [rows, width]; factors fp32 [width]; inverse_rms fp32 [rows]. rounds_first: normed rows are rounded before they
// are multiplied.
cudaError_t launch_rms_norm(Element element, const void* x, const float* factors, float eps, bool rounds_first, void* y,
                            float* inverse_rms, int64_t rows, int64_t width, cudaStream_t stream);
// Each block has a row of `partial`, fp32 [rms_norm_blocks(rows), width], whose sum is the gradient of the factors.
int64_t rms_norm_blocks(int64_t rows);
cudaError_t launch_rms_norm_backward(Element element, const void* grad, const void* x, const float* factors,
                                     const float* inverse_rms, void* grad_x, float* partial, int64_t rows,
                                     int64_t width, cudaStream_t stream);

// x, y [rows, tokens, heads, 2 half]; cos, sin fp32 [rows or 1, tokens, half], angle_row elements from one row to the
// next. heads * half fits 31 bits.
cudaError_t launch_rotary(Element element, const void* x, const float* cos, const float* sin, float sign, void* y,
                          int64_t rows, int64_t tokens, int64_t heads, int64_t half, int64_t angle_row,
                          cudaStream_t stream);

// As RowLoops::cross_entropy of rows/row_loops.h.
cudaError_t launch_cross_entropy(float* logits, const int64_t* labels, int64_t ignored_label, bool wants_gradient,
                                 float* losses, int64_t rows, int64_t classes, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
