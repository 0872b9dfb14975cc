// ElementwiseKernels for CUDA tensors. This file is compiled only in builds with nvcc and a libtorch with CUDA.
#include "tessera/kernels/rows/cuda_elementwise_kernels.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/kernels/cuda/launchers.h"
#include "tessera/kernels/dispatch/result_form.h"

namespace tessera::kernels::cuda {
namespace {

// Makes the tensor's device current and holds its current stream, for one launch.
class Launch {
 public:
  explicit Launch(const at::Tensor& like) : guard_(like.device()), stream_(c10::cuda::getCurrentCUDAStream()) {}
  cudaStream_t stream() const { return stream_.stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
};

void check_launch(const char* kernel, cudaError_t error) {
  TESSERA_CHECK(error == cudaSuccess, ErrorKind::kInternal, "[kernels.cuda] the kernel {} could not be started: {}",
                kernel, cudaGetErrorString(error));
}

ElementType element_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? ElementType::kFloat : ElementType::kBFloat16;
}

bool is_gelu(Gate kind) { return kind == Gate::kGeluTanh; }

at::Tensor gate(Gate kind, const at::Tensor& gate, const at::Tensor& up) {
  auto y = at::empty_like(gate);
  if (y.numel() == 0) return y;
  const Launch launch(gate);
  check_launch("gate", launch_gate(element_of(gate), is_gelu(kind), gate.const_data_ptr(), up.const_data_ptr(),
                                   y.mutable_data_ptr(), y.numel(), launch.stream()));
  return y;
}

std::tuple<at::Tensor, at::Tensor> gate_backward(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                 const at::Tensor& up) {
  auto grad_gate = at::empty_like(gate), grad_up = at::empty_like(gate);
  if (gate.numel() == 0) return {grad_gate, grad_up};
  const Launch launch(gate);
  check_launch("gate_backward",
               launch_gate_backward(element_of(gate), is_gelu(kind), grad.const_data_ptr(), gate.const_data_ptr(),
                                    up.const_data_ptr(), grad_gate.mutable_data_ptr(), grad_up.mutable_data_ptr(),
                                    gate.numel(), launch.stream()));
  return {grad_gate, grad_up};
}

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& factors, double eps,
                                            bool rounds_first) {
  auto y = at::empty_like(x);
  auto inverse_rms = at::empty(with_last(x.sizes(), 1), x.options().dtype(at::kFloat));
  if (x.numel() == 0) return {y, inverse_rms};
  const Launch launch(x);
  check_launch("rms_norm", launch_rms_norm(element_of(x), x.const_data_ptr(), factors.const_data_ptr<float>(),
                                           static_cast<float>(eps), rounds_first, y.mutable_data_ptr(),
                                           inverse_rms.mutable_data_ptr<float>(), x.numel() / x.size(-1), x.size(-1),
                                           launch.stream()));
  return {y, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                     const at::Tensor& factors, const at::Tensor& inverse_rms) {
  auto grad_x = at::empty_like(x);
  if (x.numel() == 0) return {grad_x, at::zeros({x.size(-1)}, factors.options())};
  const int64_t width = x.size(-1), rows = x.numel() / width;
  // Each block of the kernel adds its rows into its own row of `partial`; the sum over blocks has a fixed order.
  auto partial = at::empty({rms_norm_blocks(rows), width}, factors.options());
  const Launch launch(x);
  check_launch("rms_norm_backward",
               launch_rms_norm_backward(element_of(x), grad.const_data_ptr(), x.const_data_ptr(),
                                        factors.const_data_ptr<float>(), inverse_rms.const_data_ptr<float>(),
                                        grad_x.mutable_data_ptr(), partial.mutable_data_ptr<float>(), rows, width,
                                        launch.stream()));
  return {grad_x, partial.sum(0)};
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign) {
  auto y = at::empty_like(x);
  if (x.numel() == 0) return y;
  const int64_t rows = x.size(0), tokens = x.size(1), heads = x.size(2), half = x.size(3) / 2;
  TESSERA_CHECK(heads * half <= std::numeric_limits<int32_t>::max(), ErrorKind::kShape,
                "[kernels.cuda] rotary: found {} heads of {} elements, wanted at most 2^31 - 1 pairs per token", heads,
                2 * half);
  const Launch launch(x);
  check_launch("rotary", launch_rotary(element_of(x), x.const_data_ptr(), cos.const_data_ptr<float>(),
                                       sin.const_data_ptr<float>(), sign, y.mutable_data_ptr(), rows, tokens, heads,
                                       half, cos.size(0) == 1 ? 0 : tokens * half, launch.stream()));
  return y;
}

// Overwrites the logits with their gradient where wants_gradient is true.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient) {
  const int64_t rows = logits.size(0), classes = logits.size(1);
  auto losses = at::empty({rows}, logits.options());
  if (logits.numel() == 0) return losses.zero_();
  const auto label = labels.contiguous();
  const Launch launch(logits);
  check_launch("cross_entropy",
               launch_cross_entropy(logits.mutable_data_ptr<float>(), label.const_data_ptr<int64_t>(), kIgnoredLabel,
                                    wants_gradient, losses.mutable_data_ptr<float>(), rows, classes, launch.stream()));
  return losses;
}

}  // namespace

const ElementwiseKernels* cuda_elementwise_kernels() {
  static constexpr ElementwiseKernels kKernels{gate, gate_backward, rms_norm, rms_norm_backward, rotary, cross_entropy};
  return &kKernels;
}

}  // namespace tessera::kernels::cuda
