// Whether ranks have the same plain tensor.
#pragma once

#include <ATen/core/TensorBase.h>

#include <string>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Compares a hash of the values, in which all zeros are one. cause: of the collective, for observers. False for tensors
// without values. COLLECTIVE over the mesh.
bool is_alike(const at::TensorBase& tensor, const DeviceMesh& mesh, const std::string& cause);

}  // namespace tessera
