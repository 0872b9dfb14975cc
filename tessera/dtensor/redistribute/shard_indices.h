// Parts of a tensor, as global indices, and copies between tensors that hold different parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

using MeshDims = c10::SmallVector<int64_t, 2>;
using Coordinate = c10::SmallVector<int64_t, 4>;
using ShardIndices = c10::SmallVector<IndexSpans, 6>;  // for each tensor dim: the global indices of the part

// The parts that ranks hold before and after a step.
struct TransferPlan {
  ShardIndices held_part;    // part of this rank before the step
  ShardIndices needed_part;  // part of this rank after the step
  // Parts of the members of the step's group, in group order; empty unless requested.
  std::vector<ShardIndices> parts_before;
  std::vector<ShardIndices> parts_after;
  std::vector<bool> exchanges_with;  // for each member: whether this rank exchanges elements with it
};
// The arguments of compute_transfer(): a step that changes how a tensor of `global_sizes` is sharded, from the splits
// `from` to the splits `to` (ShardSplits in layout.h). The step's group is all ranks that have this rank's coordinates
// on the mesh dims outside of `mesh_dims`.
struct TransferRequest {
  c10::IntArrayRef global_sizes;
  const MeshDims& mesh_dims;
  const ShardSplits& from;
  const ShardSplits& to;
  bool needs_parts_before;  // compute TransferPlan::parts_before
  bool needs_parts_after;   // compute TransferPlan::parts_after
};
TransferPlan compute_transfer(const TransferRequest& request, const DeviceMesh& mesh);

Sizes sizes_of(const ShardIndices& part);
int64_t numel_of(const ShardIndices& part);
// The elements that are in both parts.
ShardIndices intersection(const ShardIndices& a, const ShardIndices& b);
// The elements of part `needed` from a tensor that holds part `held`. The result is a view if the elements are
// contiguous ranges.
at::Tensor slice_part(const at::Tensor& tensor, const ShardIndices& held, const ShardIndices& needed);
// Writes `values`, which hold part `values_part`, to their positions in a tensor that holds part `held`.
void copy_part_into(const at::Tensor& tensor, const ShardIndices& held, const at::Tensor& values,
                    const ShardIndices& values_part);
// The dim along which the concatenation of the parts is the whole; nullopt when there is none.
std::optional<int64_t> concat_dim(const ShardIndices& whole, const std::vector<ShardIndices>& parts);
// Whether the parts, one after the other, are the contiguous memory of the whole.
bool is_contiguous_concat(const ShardIndices& whole, const std::vector<ShardIndices>& parts);

}  // namespace tessera
