// Operations whose derivative formula writes to slices of the saved operands, or of tensors made from them. The sliced
// dims must not be sharded in the saved operands. A redistribution inside the operation is below autograd, so autograd
// would save the sharded operands. Therefore the kernels in this file redistribute the operands before they call
// libtorch's autograd kernel, and the gradient of the result is redistributed to the result's placements.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/redistribute/autograd.h"

namespace tessera {

namespace {

struct OperandLayout {
  const char* name;
  std::vector<int64_t> whole_dims;  // for each tensor argument: how many of its last dims must be whole
};

const std::vector<OperandLayout>& operand_layouts() {
  static const std::vector<OperandLayout> layouts = {
      {"aten::linalg_householder_product", {2, 1}},
      {"aten::ormqr", {2, 1, 2}},
  };
  return layouts;
}

bool needs_gradient(const c10::IValue& value) { return value.isTensor() && value.toTensor().requires_grad(); }

// Redistributes a tensor so that its last `whole_dims` dims are not sharded and nothing is Partial. Shards of the other
// dims (batch dims) stay.
at::Tensor with_whole_dims(const at::Tensor& tensor, int64_t whole_dims, const char* cause) {
  Placements placements = impl_of(tensor)->placements();
  for (auto& placement : placements) {
    if (!placement.is_any_shard() || placement.dim >= tensor.dim() - whole_dims) placement = Replicate();
  }
  return placements == impl_of(tensor)->placements() ? tensor
                                                     : redistribute_with_gradient(tensor, placements, {}, cause);
}

// Registers a hook that redistributes the gradient of `result` to the placements of `result`, with Replicate for
// Partial, before the derivative formula uses the gradient.
void redistribute_incoming_gradient(const at::Tensor& result) {
  if (!is_dtensor(result) || !result.requires_grad()) return;
  result.register_hook([placements = partial_to_replicated(impl_of(result)->placements())](const at::Tensor& gradient) {
    return is_dtensor(gradient) ? redistribute_gradient("gradient", gradient, placements) : gradient;
  });
}

struct LayOutOperands final : c10::OperatorKernel {
  explicit LayOutOperands(const OperandLayout* layout) : layout(layout) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t base = stack->size() - op.schema().arguments().size();
    const bool recorded = at::GradMode::is_enabled() &&
                          std::any_of(stack->begin() + static_cast<int64_t>(base), stack->end(), needs_gradient);
    for (size_t i = 0; recorded && i < layout->whole_dims.size(); ++i) {  // tensors are the first arguments
      c10::IValue& value = (*stack)[base + i];
      if (is_dtensor(value.toTensor())) value = with_whole_dims(value.toTensor(), layout->whole_dims[i], layout->name);
    }
    op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);  // libtorch's autograd kernel for all back-ends
    if (recorded) redistribute_incoming_gradient(stack->back().toTensor());
  }
  const OperandLayout* layout;
};

}  // namespace

void register_operand_layouts(torch::Library& autograd) {
  for (const auto& layout : operand_layouts()) {
    autograd.impl(layout.name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<LayOutOperands>(&layout)));
  }
}

}  // namespace tessera
