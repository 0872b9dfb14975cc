// Tests whether a plain tensor has the same values on all ranks of a mesh.
#pragma once

#include <ATen/core/TensorBase.h>

#include <string>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Compares a hash of the tensor's values between all ranks of the mesh; all tensors of zeros have the same hash.
// `cause` is the subject of the all-reduces in error messages. Returns false for a meta tensor. COLLECTIVE over the
// mesh.
bool is_equal_on_all_ranks(const at::TensorBase& tensor, const DeviceMesh& mesh, const std::string& cause);

}  // namespace tessera
