// The gradient of a base that was written through a view. Autograd's CopySlices allocates a tensor like the base,
// copies the incoming gradient into it, takes the view of it and writes there.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// Whether the view may come from unfold, which cannot view a sharded dim. An unsqueezed last dim looks the same and
// counts, too.
bool has_windows_of_one(const at::TensorGeometry& view, const at::TensorGeometry& base) {
  return view.dim() == base.dim() + 1 && view.size(view.dim() - 1) == 1;
}

// Whether the view may have another dtype (view_as_real, view_as_complex); its strides then count other elements.
bool may_be_of_another_type(const at::TensorGeometry& view, const at::TensorGeometry& base, bool complex) {
  return complex || (base.dim() > 0 && base.size(base.dim() - 1) == 2 && view.dim() < base.dim());
}

// Whether the view contains the base's dim unchanged. Then it is a view also if the dim is sharded. The strides of an
// empty view mean nothing, so the answer is false.
bool keeps_dim(const at::TensorGeometry& view, const at::TensorGeometry& base, int64_t dim, bool complex) {
  if (view.numel() == 0 || has_windows_of_one(view, base) || may_be_of_another_type(view, base, complex)) return false;
  for (int64_t i = 0; i < view.dim(); ++i) {
    if (view.size(i) == base.size(dim) && view.stride(i) == base.stride(dim) && base.size(dim) > 1) return true;
  }
  return false;
}

}  // namespace

// new_empty_strided(self, size, stride, ...): dims that the view changes are whole, so that the view and the write are
// local.
void handle_new_empty_strided(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto node = torch::autograd::get_current_node();
  const auto* write = dynamic_cast<const torch::autograd::CopySlices*>(node.get());
  const c10::IValue* args = arguments_of(op, *stack);
  const at::Tensor gradient = args[0].toTensor();
  const auto sizes = args[1].toIntVector();
  if (write == nullptr || !is_dtensor(gradient) || write->base.sizes() != c10::IntArrayRef(sizes)) {
    dispatch_by_rule(op, keys, *stack);
    return;
  }
  const DTensorImpl& impl = *impl_of(gradient);
  Placements placements = impl.placements();
  for (auto& placement : placements) {
    if (!placement.is_any_shard() || !keeps_dim(write->view, write->base, placement.dim, gradient.is_complex())) {
      placement = Replicate();
    }
  }
  const auto strides = args[2].toIntVector();
  const Sizes local = local_sizes(sizes, *impl.mesh(), placements);
  const at::Tensor part = at::empty_strided(local, strides_in_order(local, strides), gradient.options());
  finish_call(op, *stack, {make_dtensor(part, impl.mesh(), make_shared_placements(placements), sizes, strides)});
}

}  // namespace tessera
