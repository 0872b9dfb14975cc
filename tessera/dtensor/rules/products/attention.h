// What the rules of the attention kernels share: which of the dims [batch, heads, length, width] they cut.
#pragma once

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// On which mesh dims heads may be cut. Keys and values may have fewer heads than queries: then a rank's queries meet
// their own heads only where both divide evenly over all mesh dims that cut them.
std::vector<bool> head_cuts(const OpCall& call);

// How a mask lies where one of the dims is cut: it broadcasts over what it has with size 1.
Placement of_mask(const TensorInput& mask, int64_t dim);

// Whether some elements are dropped: parts would drop the same ones, so nothing is cut.
bool uses_dropout(const OpCall& call);

// `add` proposes the strategy that cuts one of `dims` (1 is the heads) on a mesh dim, for each mesh dim that may.
template <class Add>
void propose_cuts(const OpCall& call, Proposal& proposal, c10::ArrayRef<int64_t> dims, const Add& add) {
  for (const bool heads : head_cuts(call)) {
    for (const int64_t dim : dims) {
      if (dim != 1 || heads) add(dim);
    }
    proposal.by_mesh_dim.push_back(std::exchange(proposal.strategies, {}));
  }
}

}  // namespace tessera
