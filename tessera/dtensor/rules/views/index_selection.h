// Functions that the rules of index.cc and index_write.cc share: the positions of dims in the result of indexing, and
// range checks of index tensors.
#pragma once

#include <algorithm>
#include <vector>

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// Where the dims of self are in the result of indexing self with a list of index tensors.
struct IndexSelection {
  std::vector<bool> indexed;
  int64_t broadcast_dims = 0;
  int64_t front = 0;  // number of dims of the result before the dims of the index tensors
  bool masks = false;

  int64_t dims() const { return broadcast_dims + std::ranges::count(indexed, false); }
  // Returns the dim of the result that dim `dim` of self becomes. `dim` must have no index tensor.
  int64_t position(int64_t dim) const {
    const int64_t seen = std::count(indexed.begin(), indexed.begin() + dim, false);
    return seen < front ? seen : seen + broadcast_dims;
  }
};
// Reads the list of index tensors at schema position `indices_arg`; self is the first input. The dims of the index
// tensors take the place of the first indexed dim, or come first when the indexed dims are not adjacent.
IndexSelection read_selection(const OpCall& call, int indices_arg);

// An index tensor among the arguments, and the size of the dim that it indexes.
struct CheckedIndex {
  int arg;
  int element;  // position in a list; -1 for the argument itself
  int64_t size;
  bool from_end;  // negative indices count from the end
};

// On a rank whose local tensor has no elements ATen's kernels do not read the index tensors, so an index out of range
// would raise an error on the other ranks only. This function gives the result of Proposal::local: null if this rank's
// shard of the first input has elements, else a function that checks the indices (Error kShape) and then runs the
// operation.
LocalFunction check_indices_if_empty(const OpCall& call, const PlacementChoice& choice,
                                     std::vector<CheckedIndex> places);

}  // namespace tessera
