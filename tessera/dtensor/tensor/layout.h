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
// into pieces, and each rank holds one chunk of each piece.
struct ShardSplit {
  int64_t mesh_dim;
  int64_t dim;
  int32_t pieces;
  bool operator==(const ShardSplit&) const = default;
};
// All splits of a tensor, outermost first. A strided shard that means "after the shards of later mesh dims" (FSDP over
// TP) becomes an ordinary split at the inner position.
using ShardSplits = c10::SmallVector<ShardSplit, 4>;
ShardSplits shard_splits_of(const DeviceMesh& mesh, const Placements& placements);
// Whether the shard on mesh dim i was made after the shards of later mesh dims. This is _S(d, f) if f is the product of
// the sizes of the later mesh dims that shard d, and these are ordinary shards or nested in the same way. FSDP over TP
// makes such tensors: a rank holds an ordinary shard of the shard of the later mesh dims.
bool is_inside_later_shards(const DeviceMesh& mesh, const Placements& placements, size_t i);

// A range of consecutive global indices along one dim. A list of spans is in the order of the rank's memory.
struct IndexSpan {
  int64_t start;
  int64_t size;
  bool operator==(const IndexSpan&) const = default;
};
using IndexSpans = c10::SmallVector<IndexSpan, 2>;
int64_t length(const IndexSpans& spans);
// The coordinate of the rank at `position` in the mesh's list of ranks; the last dim varies fastest.
std::vector<int64_t> coordinate_at(const DeviceMesh& mesh, int64_t position);
// The elements of `whole` that rank i of k holds if `whole` is sharded: one chunk of each of `pieces` pieces.
IndexSpans shard_index_spans(const IndexSpans& whole, int64_t k, int64_t i, int32_t pieces);
// The indices of dim `dim`, which has n elements, that the rank at `coordinate` holds. Empty when it holds none.
IndexSpans local_index_spans(int64_t n, int64_t dim, const DeviceMesh& mesh, const ShardSplits& splits,
                             c10::IntArrayRef coordinate);

// Number of elements of a dim of n that one rank of k holds if the dim is sharded: the sum of one chunk of each piece.
int64_t local_shard_size(int64_t n, int64_t k, int64_t coordinate, int64_t pieces);
// Shape of this rank's local tensor. All zero on a rank outside the mesh.
Sizes local_sizes(c10::IntArrayRef global, const DeviceMesh& mesh, const Placements& placements);
Sizes dense_strides(c10::IntArrayRef sizes);
// Dense strides for these sizes, with the dims in the same memory order as in `like`.
Sizes strides_in_order(c10::IntArrayRef sizes, c10::IntArrayRef like);
// Strides of the copy that a view gathers because it cannot alias. The copy is dense and keeps the memory order of the
// dims, so that every view of the tensor is also a view of the copy. It is contiguous if elements of the tensor share
// memory.
Sizes gathered_copy_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides);
// Whether `strides` and `other_strides` describe the same layout for these sizes. Dims of one element are ignored.
bool has_same_layout(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef other_strides);
// Error kShape unless there is one placement for each mesh dim, the dims are in range and the reductions can be
// combined. Negative dims are made non-negative.
void check_placements(const char* verb, const DeviceMesh& mesh, Placements& placements, int64_t ndim);
// Whether two Partial placements may occur in one list of placements.
bool can_combine_partials(const Placement& a, const Placement& b);
// Whether all Partial placements of the list may occur together: one reduction, or sums and averages.
bool are_partials_compatible(const Placements& placements);

}  // namespace tessera
