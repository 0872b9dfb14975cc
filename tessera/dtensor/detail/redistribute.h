// Changing the placements of a local tensor: a plan of single steps, its cost, and its execution.
//
// Planning communicates nothing and gives the same steps on all ranks that take part in them. Semantics and cost model of
// torch.distributed.tensor's greedy plan.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/detail/layout.h"

namespace tessera::detail {

struct Step {
  int64_t mesh_dim;
  Placement from;
  Placement to;
  int64_t size_from;  // elements of from.dim over this mesh dim; 0 unless from is a shard
  int64_t size_to;    // elements of to.dim over this mesh dim; 0 unless to is a shard
};
using Steps = c10::SmallVector<Step, 2>;

// The steps that lead from one list of placements to another, in order.
Steps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from, const Placements& to);

// Estimated microseconds, to compare strategies; infinite for a shard that would become partial.
double redistribute_cost(c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh, const Placements& from,
                         const Placements& to);

// Carries out the steps on this rank's part. COLLECTIVE over the mesh dims whose step communicates. The result may share
// memory with `local` only when may_alias is set. Dispatch must be below autograd.
at::Tensor run_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias);

}  // namespace tessera::detail
