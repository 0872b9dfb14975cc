// Sizes and strides of a DTensor and of its local part.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

using Sizes = c10::SmallVector<int64_t, 6>;

// One division of tensor dim `dim` over mesh dim `mesh_dim`; pieces > 1: of each piece one chunk (StridedShard).
struct Cut {
  int64_t mesh_dim;
  int64_t dim;
  int32_t pieces;
  bool operator==(const Cut&) const = default;
};
// Outermost first. A strided shard that stands for "after the later mesh dims" (FSDP over tensor parallel) is an
// ordinary cut at its place.
using Cuts = c10::SmallVector<Cut, 4>;
Cuts cuts_of(const DeviceMesh& mesh, const Placements& placements);
// Whether the shard on mesh dim i was made after those of later mesh dims: _S(d, f) with f the product of the sizes of
// the later mesh dims that shard d, which are ordinary shards or nested so themselves. FSDP over TP gives such tensors.
// What lies on a rank is then an ordinary shard of what the later ones hold.
bool is_nested_last(const DeviceMesh& mesh, const Placements& placements, size_t i);

// Global indices along one dim that lie on a rank, in the order of its memory.
struct Run {
  int64_t start;
  int64_t size;
  bool operator==(const Run&) const = default;
};
using Runs = c10::SmallVector<Run, 2>;
int64_t length(const Runs& runs);
// The coordinate of the rank at a position in the mesh's list of ranks, the last dim running fastest.
std::vector<int64_t> coordinate_at(const DeviceMesh& mesh, int64_t position);
// Of the elements of `whole` those that the i-th of k ranks holds: of each of the pieces one chunk.
Runs part_of_cut(const Runs& whole, int64_t k, int64_t i, int32_t pieces);
// Those of dim `dim` of n elements that the rank at `coordinate` of the mesh holds. No runs: none.
Runs runs_of(int64_t n, int64_t dim, const DeviceMesh& mesh, const Cuts& cuts, c10::IntArrayRef coordinate);

// Elements of a dim of n that one rank of k holds under a shard: of each of the pieces one chunk.
int64_t local_extent(int64_t n, int64_t k, int64_t coordinate, int64_t pieces);
// Shape of this rank's part; all zero on a rank outside the mesh.
Sizes local_sizes(c10::IntArrayRef global, const DeviceMesh& mesh, const Placements& placements);
Sizes dense_strides(c10::IntArrayRef sizes);
// Dense strides of a tensor of these sizes whose dims lie in memory in the order that `like` has.
Sizes strides_in_order(c10::IntArrayRef sizes, c10::IntArrayRef like);
// How a copy lies in memory that a view gathers of a tensor of these sizes and strides, because it is cut where it may
// not be: dense, its dims in the same order, so that what can be viewed of the tensor can be of the copy; contiguous
// where elements share memory.
Sizes strides_of_gathered(c10::IntArrayRef sizes, c10::IntArrayRef strides);
// Whether a tensor of these sizes lies so in memory, whatever its dims of one element say.
bool lies_as(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef wanted);
// One placement a mesh dim, dims in range (negative ones are made positive), reductions that go together.
void check_placements(const char* verb, const DeviceMesh& mesh, Placements& placements, int64_t ndim);
// Whether two Partials may stand in one list of placements.
bool can_mix(const Placement& a, const Placement& b);
// Whether those of a list may: there is one reduction, or sums and averages.
bool partials_go_together(const Placements& placements);

}  // namespace tessera
