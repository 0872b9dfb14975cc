// ShardIndices describes a part of a global tensor by global indices. The functions compute which parts ranks exchange
// in a redistribution step, and copy elements between tensors that hold different parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

using MeshDims = c10::SmallVector<int64_t, 2>;
using Coordinate = c10::SmallVector<int64_t, 4>;
using ShardIndices = c10::SmallVector<IndexSpans, 6>;  // for each tensor dim: the global indices of the part

// The parts of a tensor that this rank and the other ranks of the step's group hold before and after one
// RedistributeStep.
struct TransferPlan {
  ShardIndices held_part;    // part of this rank before the step
  ShardIndices needed_part;  // part of this rank after the step
  // The parts that the ranks of the step's group (see TransferRequest) hold before and after the step, one per rank, in
  // group order. parts_before is empty unless TransferRequest::needs_parts_before is true, and parts_after is empty
  // unless needs_parts_after is true.
  std::vector<ShardIndices> parts_before;
  std::vector<ShardIndices> parts_after;
  std::vector<bool> exchanges_with;  // for each member: whether this rank exchanges elements with it
};
// The arguments of compute_transfer(): a step that changes how a tensor of `global_sizes` is sharded, from the splits
// `from` to the splits `to` (ShardSplits in layout.h). The step's group consists of all ranks that have this rank's
// coordinates on the mesh dims that are not in `mesh_dims`.
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
// Returns the indices that are in both parts.
ShardIndices intersection(const ShardIndices& a, const ShardIndices& b);
// Returns the elements of part `needed` from a tensor that holds part `held`, which must contain `needed`. The result
// is a view if the elements are one range of `tensor` in each dim.
at::Tensor slice_part(const at::Tensor& tensor, const ShardIndices& held, const ShardIndices& needed);
// `tensor` holds the part `held` of a whole tensor, and `values` holds the part `values_part` of the same whole tensor.
// Writes `values` to the positions of values_part in `tensor`.
void copy_part_into(const at::Tensor& tensor, const ShardIndices& held, const at::Tensor& values,
                    const ShardIndices& values_part);
// Returns the dim along which the concatenation of the parts gives the whole tensor; nullopt when there is none.
std::optional<int64_t> concat_dim(const ShardIndices& whole, const std::vector<ShardIndices>& parts);
// Whether `whole` is the concatenation of `parts` in memory: the contiguous local tensors of the parts, stored one
// after the other, have the same memory layout as the contiguous tensor of `whole`.
bool is_contiguous_concat(const ShardIndices& whole, const std::vector<ShardIndices>& parts);

}  // namespace tessera
