// Shared by reading and writing at index tensors: the positions of dims in the selection, and checks of indices.
#pragma once

#include <algorithm>
#include <vector>

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// The dims of self in the result of indexing self with index tensors.
struct IndexSelection {
  std::vector<bool> indexed;
  int64_t broadcast_dims = 0;
  int64_t front = 0;  // number of dims of the result before the dims of the index tensors
  bool masks = false;

  int64_t dims() const { return broadcast_dims + std::ranges::count(indexed, false); }
  // Position in the result of dim `dim` of self, which must not be indexed.
  int64_t position(int64_t dim) const {
    const int64_t seen = std::count(indexed.begin(), indexed.begin() + dim, false);
    return seen < front ? seen : seen + broadcast_dims;
  }
};
// Reads the list of index tensors at a schema position; self is the first input. The dims of the index tensors take the
// place of the first indexed dim, or come first when the indexed dims are not adjacent.
IndexSelection read_selection(const OpCall& call, int indices_arg);

// An index tensor among the arguments, and the size of the dim that it indexes.
struct CheckedIndex {
  int arg;
  int element;  // position in a list; -1 for the argument itself
  int64_t size;
  bool from_end;  // negative indices count from the end
};

// Kernels do not read the index on a rank whose part has no elements, so an index out of range would raise an error on
// the other ranks only. For Proposal::local: returns null if this rank's part of the first input has elements, else a
// function that checks the indices (Error kShape) and then runs the operation.
LocalFunction check_indices_if_empty(const OpCall& call, const PlacementChoice& choice,
                                     std::vector<CheckedIndex> places);

}  // namespace tessera
