// Tests whether a plain tensor has the same values on all ranks of a mesh.
#pragma once

#include <ATen/core/TensorBase.h>

#include <string>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Returns whether a hash of the tensor's values is the same on all ranks of the mesh. Tensors of zeros have the same
// hash for every dtype and shape. Always returns false for a meta tensor, whose values are unknown. `cause` is the
// subject of the all-reduces in error messages. COLLECTIVE over the mesh.
bool is_equal_on_all_ranks(const at::TensorBase& tensor, const DeviceMesh& mesh, const std::string& cause);

}  // namespace tessera
