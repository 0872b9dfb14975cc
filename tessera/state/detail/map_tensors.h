// Replaces the local tensors in a state dict.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "tessera/state/state_value.h"

namespace tessera::detail {

// Returns a DTensor like `dtensor` with another local tensor of the same size.
at::Tensor dtensor_with_local(const at::Tensor& dtensor, const at::Tensor& local);
// Applies `change` to the local tensor of a tensor or DTensor, or to all local shards of a ShardedTensor. Any other
// value is returned unchanged.
StateValue map_local_parts(const StateValue& value, const std::function<at::Tensor(const at::Tensor&)>& change);
// Returns the whole DTensor on each rank, on the device of its mesh, on whichever device the local tensor is.
// COLLECTIVE over the mesh of the DTensor. Error kShape for a DTensor on the meta device; its message begins with
// `where`.
at::Tensor gather_full_tensor(const at::Tensor& dtensor, const char* where);
// Waits until all work on the device has ended, including asynchronous copies from and to its memory. Does nothing for
// nullopt.
void wait_for_copies(const std::optional<c10::Device>& device);

}  // namespace tessera::detail
