// The position of a group's ranks in a mesh.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::optim::detail {

// The dims of a mesh, which contains this rank, in which the ranks of `group` differ from this rank. Ranks of the group
// outside of the mesh are ignored; they have meshes of their own.
std::vector<int64_t> dims_along(const DeviceMesh& mesh, const comm::Group& group);

}  // namespace tessera::optim::detail
