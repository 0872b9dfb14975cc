// Tests whether all ranks hold the same plain tensor.
#pragma once

#include <ATen/core/TensorBase.h>

#include <string>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Compares a hash of the values over the mesh; all tensors of zeros have one hash. `cause` names the collective for
// observers. Returns false for a tensor without values (meta). COLLECTIVE over the mesh.
bool is_equal_on_all_ranks(const at::TensorBase& tensor, const DeviceMesh& mesh, const std::string& cause);

}  // namespace tessera
