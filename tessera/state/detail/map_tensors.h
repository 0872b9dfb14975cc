// Changing the local parts of the tensors of a state dict.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "tessera/state/state_value.h"

namespace tessera::detail {

// The DTensor with another local part of the same size.
at::Tensor with_local(const at::Tensor& dtensor, const at::Tensor& local);
// A tensor with its local part changed, or a ShardedTensor with all its local shards; anything else as it is.
StateValue map_local_parts(const StateValue& value, const std::function<at::Tensor(const at::Tensor&)>& change);
// All of a DTensor on each rank, on the device of its mesh, wherever its local part lies. COLLECTIVE over its mesh.
// Error kShape, which begins with `where`, for a DTensor on the meta device.
at::Tensor whole_of_dtensor(const at::Tensor& dtensor, const char* where);
// Waits for what was copied to or from this device; nullopt: nothing was.
void wait_for_copies(const std::optional<c10::Device>& device);

}  // namespace tessera::detail
