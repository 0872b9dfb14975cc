// Indices out of range on ranks whose part has no elements: kernels look at no index there, and the ranks that have
// elements would raise alone.
#pragma once

#include <vector>

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// An index tensor among the arguments and how long the dim is that it reads or writes.
struct Places {
  int arg;
  int element;  // of a list; -1: the argument itself
  int64_t size;
  bool from_end;  // negative ones count from the end
};

// For Proposal::local: null where the part of the first input has elements, else the operation after a check of the
// indices, which raises Error kShape.
LocalFunction checked_where_empty(const OpCall& call, const Choice& choice, std::vector<Places> places);

}  // namespace tessera
