#include "tessera/dtensor/rules/views/index_selection.h"

#include <c10/util/accumulate.h>

namespace tessera {

// If no dim without an index is between the indexed dims, the dims of the index tensors replace the indexed dims in
// place. Otherwise the dims of the index tensors come first in the result, as in PyTorch.
IndexSelection read_selection(const OpCall& call, int indices_arg) {
  IndexSelection selection;
  selection.indexed.assign(call.inputs[0].dim(), false);
  for (const auto& input : call.inputs) {
    if (input.arg == indices_arg) {
      const auto type = input.tensor->scalar_type();
      selection.masks = selection.masks || type == at::kBool || type == at::kByte;
      selection.broadcast_dims = std::max(selection.broadcast_dims, input.dim());
      if (input.element < call.inputs[0].dim()) selection.indexed[input.element] = true;
    }
  }
  const auto first = std::ranges::find(selection.indexed, true);
  const auto gap = std::find(first, selection.indexed.end(), false);
  const bool together = std::find(gap, selection.indexed.end(), true) == selection.indexed.end();
  selection.front = together ? first - selection.indexed.begin() : 0;
  return selection;
}

// If all ranks hold the same index tensor, all ranks raise an error for an index out of range: ranks whose local tensor
// has elements raise it in ATen's kernel, the others in the function that is returned here.
LocalFunction check_indices_if_empty(const OpCall& call, const PlacementChoice& choice,
                                     std::vector<CheckedIndex> places) {
  const Sizes part = local_sizes(call.inputs[0].sizes, *call.mesh, choice.inputs[0]);
  const bool anything = c10::multiply_integers(call.inputs[0].sizes) > 0;
  if (!call.mesh->coordinate() || !anything || c10::multiply_integers(part) > 0) return nullptr;
  return [places = std::move(places)](const LocalCall& local) {
    for (const auto& place : places) {
      const c10::IValue& given = local.arg(static_cast<size_t>(place.arg));
      const at::Tensor index =
          place.element < 0 ? given.toTensor() : given.toListRef()[static_cast<size_t>(place.element)].toTensor();
      check_indices(local.op.name, index, place.size, place.from_end);
    }
    local.call();
  };
}

}  // namespace tessera
