// Products of float8 tensors, with CUDA's requirements: sizes in multiples of 16, one operand by rows and the other by
// columns in memory, and dequantization scales on the device.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool is_float8(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kFloat8_e5m2;
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                 const MaybeTensor& bias, const MaybeTensor& scale_result, std::optional<at::ScalarType> type, bool) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.size(1) % 16 == 0 && b.size(1) % 16 == 0,
              "[pretend] _scaled_mm of ", a.sizes(), " and ", b.sizes(), ": trailing dims must be divisible by 16");
  TORCH_CHECK(a.is_contiguous() && b.t().is_contiguous(), "[pretend] _scaled_mm of strides ", a.strides(), " and ",
              b.strides());
  TORCH_CHECK(
      is_float8(a) && is_float8(b) && !(a.scalar_type() == at::kFloat8_e5m2 && b.scalar_type() == at::kFloat8_e5m2),
      "[pretend] _scaled_mm of ", a.scalar_type(), " and ", b.scalar_type());
  for (const auto* scale : {&scale_a, &scale_b}) {
    TORCH_CHECK(scale->numel() == 1 && scale->scalar_type() == at::kFloat && scale->device() == a.device(),
                "[pretend] _scaled_mm: a scale of ", scale->scalar_type());
  }
  TORCH_CHECK(!bias && !scale_result && type, "[pretend] _scaled_mm with a bias, or without a dtype");
  const auto y = at::empty({a.size(0), b.size(1)}, a.options().dtype(*type));
  run_on("aten::_scaled_mm", {a, b, scale_a, scale_b}, {y},
         [a = host_view(a), b = host_view(b), scale_a = host_view(scale_a), scale_b = host_view(scale_b),
          y = host_view(y)] {
           const auto product = a.to(at::kFloat).matmul(b.to(at::kFloat));
           at::Tensor(y).copy_(product.mul_(scale_a).mul_(scale_b));
         });
  return y;
}

}  // namespace

void register_float8() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("_scaled_mm", TORCH_FN(scaled_mm));
}

}  // namespace tessera::pretend
