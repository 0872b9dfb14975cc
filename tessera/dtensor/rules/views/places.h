// What reading and writing at the places that index tensors name share: where dims stand in what is selected, and
// indices out of range.
#pragma once

#include <algorithm>
#include <vector>

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// Where the dims of self stand in what index tensors select of it.
struct Selection {
  std::vector<bool> indexed;
  int64_t broadcast_dims = 0;
  int64_t front = 0;  // dims of the selection before those of the index tensors
  bool masks = false;

  int64_t dims() const { return broadcast_dims + std::ranges::count(indexed, false); }
  // Of a dim that is not indexed.
  int64_t position(int64_t dim) const {
    const int64_t seen = std::count(indexed.begin(), indexed.begin() + dim, false);
    return seen < front ? seen : seen + broadcast_dims;
  }
};
// Of the first input by the list of index tensors at a schema position. The dims of the index tensors stand where the
// first indexed dim is, or in front when indexed dims are apart.
Selection read_selection(const OpCall& call, int indices_arg);

// An index tensor among the arguments and how long the dim is that it reads or writes.
struct Places {
  int arg;
  int element;  // of a list; -1: the argument itself
  int64_t size;
  bool from_end;  // negative ones count from the end
};

// Kernels look at no index on ranks whose part has no elements, and the ranks that have elements would raise alone.
// For Proposal::local: null where the part of the first input has elements, else the operation after a check of the
// indices, which raises Error kShape.
LocalFunction checked_where_empty(const OpCall& call, const Choice& choice, std::vector<Places> places);

}  // namespace tessera
