// Loops over rows and elements of plain tensors, fp32 and bf16, computed in fp32: the kernels that read and write each
// element once. On the CPU threads take rows in blocks of fixed size, so that their number does not show in the result;
// on CUDA, in builds that have them, they are kernels of our own (cuda/row_twins.h). All tensors lie on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::kernels {

enum class Gate { kSilu, kGeluTanh };

// The loops of one kind of device.
struct RowLoops {
  // activation(gate) * up; both contiguous, of one dtype.
  at::Tensor (*gate)(Gate kind, const at::Tensor& gate, const at::Tensor& up);
  // The gradients of gate and up.
  std::tuple<at::Tensor, at::Tensor> (*gate_backward)(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                      const at::Tensor& up);

  // y and the fp32 inverse of the rows' root mean square [..., 1]. x contiguous [..., d], d in lanes of 16; factors [d]
  // fp32. rounds_first: normed rows are rounded to their dtype before they are multiplied.
  std::tuple<at::Tensor, at::Tensor> (*rms_norm)(const at::Tensor& x, const at::Tensor& factors, double eps,
                                                 bool rounds_first);
  // grad_x as x, grad_weight [d] fp32; grad and x contiguous, of one dtype.
  std::tuple<at::Tensor, at::Tensor> (*rms_norm_backward)(const at::Tensor& grad, const at::Tensor& x,
                                                          const at::Tensor& factors, const at::Tensor& inverse_rms);

  // x [B, T, H, d], contiguous, with d in lanes of 32; cos and sin fp32 [B or 1, T, d / 2], contiguous.
  at::Tensor (*rotary)(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign);

  // Rows of logits [rows, classes] fp32, contiguous, become their exponentials over the sum of these, less 1 at the
  // row's label. Returns the rows' losses, fp32 [rows]. wants_gradient: else the logits are left as they are. Labels
  // are classes on a CPU; on CUDA kIgnoredLabel makes the row and its loss 0, any other label makes them NaN.
  at::Tensor (*cross_entropy)(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient);
};

// Whether there are loops for such tensors here: fp32 or bf16, on a CPU with AVX-512 or AVX2 or on CUDA in a build with
// nvcc.
bool has_row_loops(c10::Device device, at::ScalarType type);
// Whether the loops run on this tensor: it has elements, too, and on a CPU its last dim is a multiple of `lanes`.
bool runs_row_loops(const at::Tensor& tensor, int64_t lanes = 1);
// Error kInternal where has_row_loops() says that there are none.
const RowLoops& row_loops(c10::Device device);

// x^T, contiguous, of x [rows, columns], fp32 with elements of a row side by side; both sizes multiples of 16.
at::Tensor transposed_loop(const at::Tensor& x);

}  // namespace tessera::kernels
