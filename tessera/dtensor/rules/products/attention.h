// Shared by the rules of attention kernels: which of the dims [batch, heads, length, width] are sharded.
#pragma once

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// For each mesh dim whether heads may be sharded on it. Keys and values may have fewer heads than queries (GQA). Then a
// rank's queries match its key heads only if both numbers of heads divide evenly over all mesh dims that shard heads.
std::vector<bool> can_shard_heads(const OpCall& call);

// Placement of the mask if dim `dim` is sharded. The mask is whole on a dim of size 1, because it broadcasts there.
Placement mask_placement(const TensorInput& mask, int64_t dim);

// Whether dropout is used. Then nothing is sharded, because every rank would drop the same elements of its part.
bool uses_dropout(const OpCall& call);

// Calls add(dim) for each mesh dim and each of `dims` that may be sharded on it; dim 1 is the heads. `add` must push a
// strategy to proposal.strategies.
template <class Add>
void propose_shards(const OpCall& call, Proposal& proposal, c10::ArrayRef<int64_t> dims, const Add& add) {
  for (const bool heads : can_shard_heads(call)) {
    for (const int64_t dim : dims) {
      if (dim != 1 || heads) add(dim);
    }
    proposal.by_mesh_dim.push_back(std::exchange(proposal.strategies, {}));
  }
}

}  // namespace tessera
