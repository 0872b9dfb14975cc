// Finds the mesh dims along which the ranks of a process group lie.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::optim::detail {

// Returns the dims of `mesh` in which the coordinate of at least one rank of `group` differs from this rank's
// coordinate. This rank must be in the mesh. Ranks of the group that are not in the mesh are ignored.
std::vector<int64_t> dims_along(const DeviceMesh& mesh, const comm::Group& group);

}  // namespace tessera::optim::detail
