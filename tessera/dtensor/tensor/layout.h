// Sizes and strides of a DTensor and of its local tensor.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

using Sizes = c10::SmallVector<int64_t, 6>;

// The division of tensor dim `dim` over mesh dim `mesh_dim`. With pieces > 1 (StridedShard) the dim is first divided
// into this number of pieces, and each rank holds one chunk of each piece.
struct ShardSplit {
  int64_t mesh_dim;
  int64_t dim;
  int32_t pieces;
  bool operator==(const ShardSplit&) const = default;
};
// All splits of a tensor, outermost first: each split divides the chunks of the splits before it. A StridedShard for
// which is_inside_later_shards() is true (FSDP over TP) becomes an ordinary split with 1 piece after the splits of the
// later mesh dims.
using ShardSplits = c10::SmallVector<ShardSplit, 4>;
ShardSplits shard_splits_of(const DeviceMesh& mesh, const Placements& placements);
// Whether the placement on mesh dim i is a StridedShard that divides the chunks of the later mesh dims' shards. This is
// so for _S(d, f) if f is the product of the sizes of the later mesh dims that shard d, and if each of these is a Shard
// or a StridedShard for which this function is true. FSDP over TP makes such tensors: TP divides dim d first, although
// its mesh dim is the later one, and FSDP divides each TP shard.
bool is_inside_later_shards(const DeviceMesh& mesh, const Placements& placements, size_t i);

// A range of consecutive global indices along one dim. A list of spans has the order in which the local tensor holds
// the indices.
struct IndexSpan {
  int64_t start;
  int64_t size;
  bool operator==(const IndexSpan&) const = default;
};
using IndexSpans = c10::SmallVector<IndexSpan, 2>;
int64_t length(const IndexSpans& spans);
// Returns the mesh coordinate of the rank at `position` in mesh.ranks(); the last mesh dim varies fastest.
std::vector<int64_t> coordinate_at(const DeviceMesh& mesh, int64_t position);
// Returns those of the indices `whole` that rank i of k ranks holds under sharding: `whole` is divided into `pieces`
// pieces, each piece into k chunks, and the rank holds chunk i of each piece.
IndexSpans shard_index_spans(const IndexSpans& whole, int64_t k, int64_t i, int32_t pieces);
// Returns the indices of tensor dim `dim`, which has n elements, that the rank at mesh coordinate `coordinate` holds.
// Empty if the rank holds none.
IndexSpans local_index_spans(int64_t n, int64_t dim, const DeviceMesh& mesh, const ShardSplits& splits,
                             c10::IntArrayRef coordinate);

// Returns how many elements of a sharded dim one rank holds. The dim has n elements and is divided over k ranks;
// `coordinate` is the position of the rank among them. The dim is first divided into `pieces` pieces (ShardSplit); the
// rank holds one chunk of each piece, and the result is the sum of the sizes of these chunks.
int64_t local_shard_size(int64_t n, int64_t k, int64_t coordinate, int64_t pieces);
// Returns the shape of this rank's local tensor. On a rank outside the mesh all sizes are 0.
Sizes local_sizes(c10::IntArrayRef global, const DeviceMesh& mesh, const Placements& placements);
Sizes dense_strides(c10::IntArrayRef sizes);
// Returns dense strides for these sizes, with the dims in the memory order of the strides `like`.
Sizes strides_in_order(c10::IntArrayRef sizes, c10::IntArrayRef like);
// Returns the strides of the copy that a view operation makes when it must gather its input. The copy is dense and
// keeps the memory order of the input's dims, so that a view that the input's strides allow is possible on the copy. If
// a dim of the input is expanded (stride 0), the copy is contiguous.
Sizes gathered_copy_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides);
// Whether `strides` and `other_strides` describe the same layout for these sizes. Dims of one element are ignored.
bool has_same_layout(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef other_strides);
// Raises Error kShape unless there is one placement for each mesh dim, sharded dims are in [-ndim, ndim) and
// are_partials_compatible() is true. Replaces negative dims by dim + ndim. `verb` is the caller's name for the message.
void check_placements(const char* verb, const DeviceMesh& mesh, Placements& placements, int64_t ndim);
// Whether one tensor may have both Partial placements: they are equal, or sums and averages.
bool can_combine_partials(const Placement& a, const Placement& b);
// Whether one tensor may have all Partial placements of the list: can_combine_partials() is true for each two.
bool are_partials_compatible(const Placements& placements);

}  // namespace tessera
