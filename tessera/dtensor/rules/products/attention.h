// Functions for the sharding rules of attention kernels, whose operands have the dims [batch, heads, length, head dim].
#pragma once

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// Returns for each mesh dim whether the heads may be sharded on it. Keys and values may have fewer heads than queries
// (GQA). Then a rank's query heads belong to its key heads only if both numbers of heads are divided evenly over all
// mesh dims that shard heads.
std::vector<bool> can_shard_heads(const OpCall& call);

// Returns the placement of the attention mask if dim `dim` of the 4-d operands is sharded. The mask is replicated if it
// lacks the dim or has size 1 there, because it then broadcasts.
Placement mask_placement(const TensorInput& mask, int64_t dim);

// Whether dropout_p > 0. The operands must then be replicated, because ranks with the same random state would drop
// elements at the same local positions.
bool uses_dropout(const OpCall& call);

// For each mesh dim calls add(dim) for each dim in `dims` that may be sharded on this mesh dim (dim 1, the heads, only
// if can_shard_heads() allows it). `add` must push a strategy to proposal.strategies.
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
