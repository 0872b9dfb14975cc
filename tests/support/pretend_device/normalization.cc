// RMSNorm's fused kernels, which libtorch has only for accelerators: one launch in forward and one in backward.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <limits>

#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

at::ScalarType wide_type(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

Pair rms_norm(const at::Tensor& input, at::IntArrayRef shape, const std::optional<at::Tensor>& weight,
              std::optional<double> eps) {
  TORCH_CHECK(shape.size() == 1 && weight, "[pretend] _fused_rms_norm of ", shape.size(), " dims, or without a weight");
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto x = input.contiguous();
  const auto type = wide_type(x);
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  const auto y = at::empty_like(x), inverse = at::empty(sizes, x.options().dtype(type));
  const double least =
      type == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  run_on("aten::_fused_rms_norm", {x, *weight}, {y, inverse},
         [type, eps = eps.value_or(least), x = host_view(x), weight = host_view(*weight), y = host_view(y),
          inverse = host_view(inverse)] {
           const auto wide = x.to(type);
           at::Tensor(inverse).copy_(wide.square().mean(-1, true).add_(eps).rsqrt_());
           at::Tensor(y).copy_(wide.mul(inverse).mul_(weight.to(type)));
         });
  return {y, inverse};
}

Pair rms_norm_backward(const at::Tensor& grad_y, const at::Tensor& input, at::IntArrayRef shape,
                       const at::Tensor& inverse, const std::optional<at::Tensor>& weight, std::array<bool, 2> wanted) {
  TORCH_CHECK(shape.size() == 1 && weight && wanted[0] && wanted[1], "[pretend] _fused_rms_norm_backward of ",
              shape.size(), " dims, without a weight, or of one gradient");
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto x = input.contiguous(), grad = grad_y.contiguous();
  const auto type = wide_type(x);
  const auto grad_x = at::empty_like(x), grad_weight = at::empty_like(*weight);
  run_on("aten::_fused_rms_norm_backward", {x, grad, inverse, *weight}, {grad_x, grad_weight},
         [type, x = host_view(x), grad = host_view(grad), inverse = host_view(inverse), weight = host_view(*weight),
          grad_x = host_view(grad_x), grad_weight = host_view(grad_weight)] {
           const auto normed = x.to(type).mul(inverse), wide = grad.to(type), scaled = wide * weight.to(type);
           at::Tensor(grad_x).copy_((scaled - normed * (scaled * normed).mean(-1, true)).mul_(inverse));
           at::Tensor(grad_weight).copy_(wide.mul(normed).reshape({-1, x.size(-1)}).sum(0));
         });
  return {grad_x, grad_weight};
}

}  // namespace

void register_normalization() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("_fused_rms_norm", TORCH_FN(rms_norm));
  library.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
}

}  // namespace tessera::pretend
