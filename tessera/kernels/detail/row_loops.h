// Loops over rows and elements of plain CPU tensors, fp32 and bf16, computed in fp32: the kernels that read and write
// each element once. Threads take rows in blocks of fixed size, so that their number does not show in the result.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::detail {

// Whether the loops run on this tensor here: on a CPU with AVX-512 or AVX2, fp32 or bf16, with elements.
bool runs_row_loops(const at::Tensor& tensor);

enum class Gate { kSilu, kGeluTanh };
// activation(gate) * up; both contiguous, of one dtype.
at::Tensor gate_loop(Gate kind, const at::Tensor& gate, const at::Tensor& up);
// The gradients of gate and up.
std::tuple<at::Tensor, at::Tensor> gate_backward_loop(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                      const at::Tensor& up);

// y and the fp32 inverse of the rows' root mean square [..., 1]. x contiguous [..., d], d a multiple of 16; factors [d]
// fp32. rounds_first: normed rows are rounded to their dtype before they are multiplied.
std::tuple<at::Tensor, at::Tensor> rms_norm_loop(const at::Tensor& x, const at::Tensor& factors, double eps,
                                                 bool rounds_first);
// grad_x as x, grad_weight [d] fp32; grad and x contiguous, of one dtype.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward_loop(const at::Tensor& grad, const at::Tensor& x,
                                                          const at::Tensor& factors, const at::Tensor& inverse_rms);

// x [B, T, H, d], contiguous, with d a multiple of 32; cos and sin fp32 [B or 1, T, d / 2], contiguous.
at::Tensor rotary_loop(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign);

// Rows of logits [rows, classes] fp32, contiguous, become their exponentials over the sum of these, less 1 at the
// row's label. Returns the rows' losses, fp32 [rows]. wants_gradient: else the logits are left as they are.
at::Tensor cross_entropy_rows(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient);

// x^T, contiguous, of x [rows, columns], fp32 with elements of a row side by side; both sizes multiples of 16.
at::Tensor transposed_loop(const at::Tensor& x);

}  // namespace tessera::detail
