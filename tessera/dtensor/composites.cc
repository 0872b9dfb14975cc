// Composite operations whose own decomposition does not suit DTensors, written again from operations that do. They are
// registered at the autograd key too, so that their gradients come from what they are made of.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss_native.h>
#include <torch/library.h>

#include <limits>

#include "tessera/dtensor/detail/plan.h"
#include "tessera/dtensor/dtensor.h"

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

at::Tensor replicated_like(const at::Tensor& tensor, const at::Tensor& like) {
  if (is_dtensor(tensor)) {
    return tensor;
  }
  const MeshPtr& mesh = device_mesh(like);
  return from_local(tensor, mesh, Placements(static_cast<size_t>(mesh->ndim()), Replicate()));
}

// What label smoothing adds: the negative log-probabilities of all classes. Upstream masks a sum over classes, which may be
// partial, in place, and takes the mean of a selection, whose shape depends on data.
at::Tensor smooth_loss(const at::Tensor& log_probabilities, const at::Tensor& target, const at::Tensor& weight, int64_t reduction,
                       int64_t ignored_index) {
  const int64_t class_dim = log_probabilities.dim() == 1 ? 0 : 1;
  at::Tensor terms = log_probabilities;
  if (weight.defined()) {
    std::vector<int64_t> shape(static_cast<size_t>(terms.dim()), 1);
    shape[static_cast<size_t>(class_dim)] = weight.size(0);
    terms = terms * weight.view(shape);
  }
  const at::Tensor ignored = target.eq(ignored_index);
  const at::Tensor rows = (-terms.sum(class_dim)).masked_fill(ignored, 0);
  if (reduction == at::Reduction::None) {
    return rows;
  }
  if (reduction == at::Reduction::Sum) {
    return rows.sum();
  }
  at::Tensor total = ignored.logical_not().sum().to(rows.scalar_type());
  if (weight.defined()) {
    total = weight.gather(0, target.masked_fill(ignored, 0).flatten()).masked_fill(ignored.flatten(), 0).sum();
  }
  return rows.sum() / total;
}

at::Tensor cross_entropy_loss(const at::Tensor& self, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                              int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
  const bool of_classes = self.sizes() != target.sizes();  // not of probabilities
  if (label_smoothing <= 0 || label_smoothing > 1 || !of_classes || !is_dtensor(self)) {
    return at::native::cross_entropy_loss_symint(self, target, weight, reduction, std::move(ignore_index), label_smoothing);
  }
  const int64_t class_dim = self.dim() == 1 ? 0 : 1;
  const int64_t ignored = ignore_index.expect_int();
  const at::Tensor log_probabilities = at::log_softmax(self, class_dim, self.scalar_type());
  const at::Tensor loss = at::nll_loss_nd(log_probabilities, target, weight, reduction, ignored);
  const at::Tensor weights = weight && weight->defined() ? replicated_like(*weight, self) : at::Tensor();
  const at::Tensor smooth = smooth_loss(log_probabilities, replicated_like(target, self), weights, reduction, ignored);
  return (1 - label_smoothing) * loss + smooth * (label_smoothing / static_cast<double>(self.size(class_dim)));
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
      made->back()->impl("cross_entropy_loss", TORCH_FN(cross_entropy_loss));
    }
    return made;
  }();
  (void)libraries;
}

}  // namespace tessera::detail
