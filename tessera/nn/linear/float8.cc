#include "tessera/nn/linear/float8.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/nn/modules_of.h"

namespace tessera::nn {
namespace {

using kernels::Float8Tensor;
using kernels::to_float8;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The autograd function of x [..., in] times the transpose of weight [out, in]. weight8 and weight_scale are the weight
// in float8. All three products (forward, grad_x, grad_weight) run in float8; x is saved in float8.
struct Float8Product : torch::autograd::Function<Float8Product> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& weight8, const at::Tensor& weight_scale) {
    const auto x8 = to_float8(x.reshape({-1, x.size(-1)}), at::kFloat8_e4m3fn);
    ctx->save_for_backward({x8.data, x8.scale, weight8, weight_scale});
    ctx->saved_data["weight_dtype"] = static_cast<int64_t>(weight.scalar_type());
    const auto sizes = kernels::with_last(x.sizes(), weight8.size(0));
    return float8_product(x8, {weight8, weight_scale}, x.scalar_type()).view(sizes);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& grad = gradients[0];
    const auto grad8 = to_float8(grad.reshape({-1, grad.size(-1)}), at::kFloat8_e5m2);
    at::Tensor grad_x, grad_weight;
    if (ctx->needs_input_grad(0)) {
      const auto sizes = kernels::with_last(grad.sizes(), saved[2].size(1));
      grad_x = float8_product(grad8, Float8Tensor{saved[2], saved[3]}.t(), grad.scalar_type()).view(sizes);
    }
    if (ctx->needs_input_grad(1)) {
      const auto dtype = static_cast<c10::ScalarType>(ctx->saved_data["weight_dtype"].toInt());
      grad_weight = float8_product(grad8.t(), Float8Tensor{saved[0], saved[1]}.t(), dtype);
    }
    return {grad_x, grad_weight, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Float8Linear::Float8Linear(Linear& former, std::shared_ptr<Float8StepCounter> steps)
    : Linear(former, /*with_weight=*/true), steps_(std::move(steps)) {
  TESSERA_CHECK(!former.has_hooks(), ErrorKind::kConfig,
                "[nn.float8] found hooks on a Linear [{}, {}], wanted none. Convert before the model is parallelized.",
                former.weight.size(0), former.weight.size(1));
}

// Returns the weight in float8. The cached weight is valid if it was converted in the current step; whoever changes
// parameters must call begin_float8_step(), which increments the step number.
const Float8Tensor& Float8Linear::converted_weight() {
  const bool keeps = training() && steps_->number > 0;
  if (keeps && cached_in_step_ == steps_->number) return cached_weight_;
  cached_weight_ = to_float8(weight.detach(), at::kFloat8_e4m3fn);
  cached_in_step_ = keeps ? steps_->number : 0;
  ++steps_->weight_conversions;
  return cached_weight_;
}

at::Tensor Float8Linear::forward(const at::Tensor& x) {
  TESSERA_CHECK(!is_dtensor(x) && !is_dtensor(weight), ErrorKind::kConfig,
                "[nn.float8] found a weight or input that is a DTensor, wanted plain tensors: float8 with tensor "
                "parallelism is not supported in this version. Set tp to 1, or leave the module unconverted.");
  const Float8Tensor weight8 = converted_weight();
  // Before the first step and outside training the float8 weight is not cached; only `weight8` holds it, for this
  // product.
  if (cached_in_step_ == 0) cached_weight_ = {};
  const at::Tensor y = Float8Product::apply(x, weight, weight8.data, weight8.scale);
  return bias.defined() ? y + bias.to(y.scalar_type()) : y;
}

std::shared_ptr<Float8StepCounter> convert_to_float8(Module& root) {
  auto steps = std::make_shared<Float8StepCounter>();
  replace_linears(root, [&](Linear& former) { return std::make_shared<Float8Linear>(former, steps); });
  return steps;
}

std::shared_ptr<Float8StepCounter> float8_steps(Module& root) {
  const auto linears = modules_of<Float8Linear>(root);
  return linears.empty() ? nullptr : linears.front().second->steps();
}

}  // namespace tessera::nn
