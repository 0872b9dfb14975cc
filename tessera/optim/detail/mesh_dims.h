// How the ranks of a group lie in a mesh.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::optim::detail {

// The dims of a mesh, which holds this rank, along which the ranks of `group` differ from this rank. Ranks outside the
// mesh do not count: they have meshes of their own.
std::vector<int64_t> dims_along(const DeviceMesh& mesh, const comm::Group& group);

}  // namespace tessera::optim::detail
