// Sizes and strides of a DTensor and of its local part.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

using Sizes = c10::SmallVector<int64_t, 6>;

// Elements of a dim of n that one rank of k holds under a shard.
int64_t local_extent(int64_t n, int64_t k, int64_t coordinate, const Placement& placement);
// Shape of this rank's part; all zero on a rank outside the mesh.
Sizes local_sizes(c10::IntArrayRef global, const DeviceMesh& mesh, const Placements& placements);
Sizes dense_strides(c10::IntArrayRef sizes);
// Global strides with the order of dims (and gaps and broadcast dims) that the local part has.
Sizes strides_like(c10::IntArrayRef global_sizes, c10::IntArrayRef local_sizes, c10::IntArrayRef local_strides);
// One placement a mesh dim, dims in range (negative ones are made positive), reductions that go together.
void check_placements(const char* verb, const DeviceMesh& mesh, Placements& placements, int64_t ndim);
// Whether two Partials may stand in one list of placements.
bool can_mix(const Placement& a, const Placement& b);

}  // namespace tessera::detail
