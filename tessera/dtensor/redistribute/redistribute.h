// Changes the placements of a local tensor: a plan of steps, the cost of the plan, and its execution.
//
// A step changes the tensor's list of splits (ShardSplits) to another list by at most one collective, which runs over
// the group of one or of several mesh dims. Planning does not communicate and gives the same steps on all ranks. The
// plan is the greedy plan of torch.distributed.tensor, which changes one mesh dim at a time, or a cheaper plan that
// changes several mesh dims at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/shard_indices.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

struct RedistributeStep {
  enum class Kind : uint8_t {
    kSliceLocal,          // keep a part of the local tensor; no communication
    kReplicateToPartial,  // Replicate to Partial: makes values that reduce to the whole value; no communication
    kAllReduce,           // all_reduce
    kReduceScatter,       // reduce_scatter: `to` has more splits than `from`, on these mesh dims
    kAllGather,           // all_gather: `from` has more splits than `to`, on these mesh dims
    kAllToAll,            // all_to_all: from any splits to any other splits
  };
  Kind kind;
  MeshDims mesh_dims;  // ascending, each of more than one rank
  ShardSplits from;    // all splits of the tensor before the step
  ShardSplits to;      // all splits of the tensor after the step
  Sizes global_sizes;
  Placement partial = Replicate();  // placement that is reduced (or made, for kReplicateToPartial)
  std::shared_ptr<const TransferPlan> transfer = nullptr;  // parts before and after; null: each run computes it
};
using RedistributeSteps = c10::SmallVector<RedistributeStep, 2>;

// Returns the steps that change the placements `from` to `to`, in order: the cheaper of plan_greedy() and
// plan_multi_dim(). Empty on a rank outside the mesh.
RedistributeSteps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                                    const Placements& to);
// Returns PyTorch's greedy plan, in which each step changes one mesh dim. A rank outside the mesh gets the same steps
// as the other ranks.
RedistributeSteps plan_greedy(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                              const Placements& to);
// Returns a plan whose steps may change several mesh dims at once. nullopt if a NormPartial must be reduced or a mesh
// dim must become Partial.
std::optional<RedistributeSteps> plan_multi_dim(c10::IntArrayRef global_sizes, const DeviceMesh& mesh,
                                                const Placements& from, const Placements& to);
// Computes the TransferPlan of a step on a rank of the mesh. Null for kAllReduce and kReplicateToPartial, in which
// every rank keeps its elements.
std::shared_ptr<const TransferPlan> plan_transfer(const RedistributeStep& step, const DeviceMesh& mesh);
// Whether a step runs a collective.
inline bool communicates(const RedistributeStep& step) {
  return step.kind != RedistributeStep::Kind::kSliceLocal && step.kind != RedistributeStep::Kind::kReplicateToPartial;
}

// Estimated cost of the greedy plan in microseconds, by PyTorch's cost model. Infinite if a shard or another Partial
// would have to become Partial. choose() compares strategies by this cost, as PyTorch does.
double redistribute_cost(c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
                         const Placements& from, const Placements& to);
double cost_of(const RedistributeSteps& steps, int64_t item_bytes, const DeviceMesh& mesh);

// A step whose collective may still be running. wait_and_finish() waits for `work`, calls `finish` if it is set, and
// stores the result in `value`.
struct PendingStep {
  at::Tensor value;
  comm::PendingCollective work;
  std::function<at::Tensor()> finish;
  bool pending = false;
  // Waits for the collective `work`. Returns `value`, the local tensor after this step.
  at::Tensor wait_and_finish();
};

// Runs the steps on this rank's local tensor. COLLECTIVE over the mesh dims of the steps that communicate. The result
// may share memory with `local` only if `may_alias` is set. Dispatch must be below autograd.
at::Tensor run_redistribute(const at::Tensor& local, const DeviceMesh& mesh, const RedistributeSteps& steps,
                            bool may_alias);
// As run_redistribute, but does not wait for the last collective. The caller must call wait_and_finish() on the result.
PendingStep start_redistribute(const at::Tensor& local, const DeviceMesh& mesh, const RedistributeSteps& steps,
                               bool may_alias);

}  // namespace tessera
