// Kernels that read and write each element once: loops over rows and elements of plain fp32 and bf16 tensors, computed
// in fp32. On the CPU threads process blocks of rows of a fixed size, so the result does not depend on the number of
// threads. On CUDA, in builds with nvcc, they are CUDA kernels (rows/cuda_elementwise_kernels.h). All tensors of a call
// are on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::kernels {

enum class Gate { kSilu, kGeluTanh };

// The loops of one device type, as function pointers.
struct ElementwiseKernels {
  // Returns activation(gate) * up. gate and up: contiguous, of the same shape and dtype.
  at::Tensor (*gate)(Gate kind, const at::Tensor& gate, const at::Tensor& up);
  // Returns the gradients of gate and up.
  std::tuple<at::Tensor, at::Tensor> (*gate_backward)(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                      const at::Tensor& up);

  // Returns y and the fp32 inverse root mean square of each row, [..., 1]. x: contiguous [..., d], d a multiple of 16.
  // factors: fp32 [d]. rounds_first: normed rows are rounded to x's dtype before the product with factors.
  std::tuple<at::Tensor, at::Tensor> (*rms_norm)(const at::Tensor& x, const at::Tensor& factors, double eps,
                                                 bool rounds_first);
  // Returns grad_x in x's dtype and grad_weight, fp32 [d]. grad and x: contiguous, of the same dtype.
  std::tuple<at::Tensor, at::Tensor> (*rms_norm_backward)(const at::Tensor& grad, const at::Tensor& x,
                                                          const at::Tensor& factors, const at::Tensor& inverse_rms);

  // Returns x rotated as in rows/rotary.h; sign -1 rotates by the opposite angles. x: [B, T, H, d], contiguous, d a
  // multiple of 32. cos and sin: fp32 [B or 1, T, d / 2], contiguous.
  at::Tensor (*rotary)(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign);

  // Replaces each row of logits (fp32 [rows, classes], contiguous) by its softmax, minus 1 at the row's label: the
  // gradient of the logits. Without wants_gradient the logits are unchanged. Returns the rows' losses, fp32 [rows]. On
  // a CPU every label must be a class. On CUDA kIgnoredLabel makes the row and its loss 0, and any other wrong label
  // makes them NaN.
  at::Tensor (*cross_entropy)(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient);
};

// Returns whether there are loops for this dtype on this device: fp32 or bf16, on a CPU with AVX-512 or AVX2, or on
// CUDA in a build with nvcc.
bool has_elementwise_kernels(c10::Device device, at::ScalarType type);
// Returns whether the loops of elementwise_kernels() can run on this tensor: has_elementwise_kernels() is true for its
// device and dtype, it is not empty, and on a CPU its last dim is a multiple of `lanes`.
bool supports_elementwise_kernels(const at::Tensor& tensor, int64_t lanes = 1);
// Returns the loops of a device, for the dtypes of has_elementwise_kernels(). Error kInternal for a device without
// loops.
const ElementwiseKernels& elementwise_kernels(c10::Device device);

// Returns the transpose of x [rows, columns], contiguous. x: fp32 with contiguous rows; both sizes multiples of 16.
at::Tensor transpose_matrix(const at::Tensor& x);

}  // namespace tessera::kernels
