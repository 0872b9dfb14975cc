// One figure or answer from those of all ranks, for benchmarks with ranks of their own.
#pragma once

#include <ATen/ATen.h>

#include "tessera/comm/collectives/collectives.h"

namespace tessera::bench {

// Returns the largest `value` of all ranks. COLLECTIVE over the group.
inline double max_over_ranks(comm::Group& group, double value) {
  at::Tensor maximum = at::full({1}, value, at::kDouble);
  comm::all_reduce(group, maximum, comm::ReduceOp::kMax).wait();
  return maximum.item<double>();
}

// Whether `value` is true on every rank. COLLECTIVE over the group.
inline bool true_on_all_ranks(comm::Group& group, bool value) { return max_over_ranks(group, value ? 0 : 1) == 0; }

}  // namespace tessera::bench
