// Composite operations whose own decomposition does not suit DTensors, written again from operations that do. They are
// registered at the autograd key too, so that their gradients come from what they are made of.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <limits>

#include "tessera/dtensor/detail/plan.h"

namespace tessera::detail {

namespace {

// Upstream writes into at::zeros(sizes, options), which would be a plain tensor.
at::Tensor value_selecting_reduction_backward(const at::Tensor& gradient, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const bool add_dim = !keepdim && !sizes.empty();
  const at::Tensor values = add_dim ? gradient.unsqueeze(dim) : gradient;
  const at::Tensor where = add_dim ? indices.unsqueeze(dim) : indices;
  return values.new_zeros(C10_AS_INTARRAYREF_SLOW(sizes)).scatter(dim, where, values);
}

// Upstream adds eps in place to the mean, which over a sharded hidden dim is partial.
at::Tensor rms_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape, const std::optional<at::Tensor>& weight,
                    std::optional<double> eps) {
  const auto type = input.scalar_type();
  const at::Tensor x = input.to(at::toOpMathType(type));
  std::vector<int64_t> dims;
  for (size_t i = 0; i < normalized_shape.size(); ++i) {
    dims.push_back(input.dim() - 1 - static_cast<int64_t>(i));
  }
  const double smallest = type == at::kDouble ? std::numeric_limits<double>::epsilon()
                                              : static_cast<double>(std::numeric_limits<float>::epsilon());
  const at::Tensor scale = x.pow(2).mean(dims, /*keepdim=*/true).add(eps.value_or(smallest)).rsqrt();
  const at::Tensor normal = (x * scale).to(type);
  return weight && weight->defined() ? normal * *weight : normal;
}

}  // namespace

void register_composites() {
  // Never destroyed: the dispatcher keeps calling the kernels. Volatile, or the pointer would be optimised away and the
  // leak checker would find nobody who holds them.
  static auto* volatile libraries = [] {
    auto* made = new std::vector<std::unique_ptr<torch::Library>>();
    for (const auto key : {kDTensorKey, c10::DispatchKey::AutogradPrivateUse3}) {
      made->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
      made->back()->impl("value_selecting_reduction_backward", TORCH_FN(value_selecting_reduction_backward));
      made->back()->impl("rms_norm", TORCH_FN(rms_norm));
    }
    return made;
  }();
  (void)libraries;
}

}  // namespace tessera::detail
