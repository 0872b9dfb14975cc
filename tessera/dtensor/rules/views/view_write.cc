// Backward of an in-place write to a view. Autograd's CopySlices node allocates a tensor like the base with
// new_empty_strided, copies the base's gradient into it, takes the same view of it and writes to this view. The handler
// here chooses the placements of the allocated tensor.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// Whether the view may be the result of unfold, which cannot be taken of a sharded dim. The result of unsqueeze(-1) has
// the same geometry, so the function is true for it, too.
bool has_windows_of_one(const at::TensorGeometry& view, const at::TensorGeometry& base) {
  return view.dim() == base.dim() + 1 && view.size(view.dim() - 1) == 1;
}

// Whether the view may have another dtype than the base (view_as_real, view_as_complex). The strides of view and base
// then have different units and cannot be compared.
bool may_be_of_another_type(const at::TensorGeometry& view, const at::TensorGeometry& base, bool complex) {
  return complex || (base.dim() > 0 && base.size(base.dim() - 1) == 2 && view.dim() < base.dim());
}

// Whether the view contains dim `dim` of the base unchanged, so that the view can be taken also if this dim is sharded.
// False for a view without elements, because its strides have no meaning.
bool keeps_dim(const at::TensorGeometry& view, const at::TensorGeometry& base, int64_t dim, bool complex) {
  if (view.numel() == 0 || has_windows_of_one(view, base) || may_be_of_another_type(view, base, complex)) return false;
  for (int64_t i = 0; i < view.dim(); ++i) {
    if (view.size(i) == base.size(dim) && view.stride(i) == base.stride(dim) && base.size(dim) > 1) return true;
  }
  return false;
}

}  // namespace

// new_empty_strided(self, size, stride, ...). When the autograd node CopySlices calls it, the result is not sharded
// along the dims that the view changes, so that the view and the write need no communication. All other calls use the
// sharding rule of new_empty_strided.
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
