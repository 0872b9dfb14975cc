#include "tessera/kernels/linear.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/detail/linear_choice.h"

namespace tessera {
namespace {

// Below this many rows a product is bound by reading the weight, and setting up oneDNN costs more than it brings.
constexpr int64_t kMinRows = 16;

bool is_plain_cpu_float(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && !is_dtensor(tensor);
}

// y = x weight^T + bias through a node that keeps x and weight alone.
struct OneDnnLinear : torch::autograd::Function<OneDnnLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    const auto rows = x.reshape({-1, weight.size(1)});
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    return detail::onednn_product(rows, weight, bias.value_or(at::Tensor())).view(sizes);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto grad = grads[0].reshape({-1, weight.size(0)});
    at::Tensor grad_x, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) grad_x = product_nt(grad, weight.t()).view(x.sizes());
    if (ctx->needs_input_grad(1)) grad_weight = product_nt(grad.t(), x.reshape({-1, weight.size(1)}).t());
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) grad_bias = grad.sum(0);
    return {grad_x, grad_weight, grad_bias};
  }
};

}  // namespace

std::string_view linear_kernel_name() { return detail::onednn_is_faster() ? "onednn" : "aten"; }

at::Tensor product_nt(const at::Tensor& a, const at::Tensor& b) {
  const bool large = a.size(0) >= kMinRows && b.size(0) >= kMinRows && a.size(1) >= kMinRows;
  if (large && is_plain_cpu_float(a) && is_plain_cpu_float(b) && detail::onednn_is_faster()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return detail::onednn_product(a, b, {});
  }
  return at::mm(a, b.t());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool ours = is_plain_cpu_float(x) && is_plain_cpu_float(weight) && x.dim() >= 1 && weight.dim() == 2 &&
                    x.size(-1) == weight.size(1) && (!bias.defined() || is_plain_cpu_float(bias)) &&
                    x.numel() >= kMinRows * weight.size(1) && weight.size(0) >= kMinRows && weight.size(1) >= kMinRows &&
                    detail::onednn_is_faster();
  const auto given_bias = bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  return ours ? OneDnnLinear::apply(x, weight, given_bias) : at::linear(x, weight, given_bias);
}

}  // namespace tessera
