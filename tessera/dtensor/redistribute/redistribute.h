// Changes the placements of a local tensor: a plan of steps, the cost of the plan, and its execution.
//
// A step changes the tensor from one list of cuts (Cuts) to another by at most one collective, over the group of one or
// of several mesh dims. Planning does not communicate and gives the same steps on all ranks. The plan is the greedy
// plan of torch.distributed.tensor, which changes one mesh dim at a time, or a cheaper plan that changes several mesh
// dims at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/shard_indices.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

struct Step {
  enum class Kind : uint8_t {
    kCut,            // keep a part of the local tensor; no communication
    kSpread,         // Replicate to Partial: makes values that reduce to the whole value; no communication
    kReduce,         // all_reduce
    kReduceScatter,  // reduce_scatter: `to` has more cuts than `from`, on these mesh dims
    kGather,         // all_gather: `from` has more cuts than `to`, on these mesh dims
    kExchange,       // all_to_all: from any cuts to any other cuts
  };
  Kind kind;
  MeshDims mesh_dims;  // ascending, each of more than one rank
  Cuts from;           // all cuts of the tensor before the step
  Cuts to;             // all cuts of the tensor after the step
  Sizes global_sizes;
  Placement partial = Replicate();                     // placement that is reduced (or made, for kSpread)
  std::shared_ptr<const Movement> movement = nullptr;  // parts before and after; null: each run computes it
};
using Steps = c10::SmallVector<Step, 2>;

// The steps from one list of placements to another, in order. Empty on a rank outside the mesh.
Steps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                        const Placements& to);
// The greedy plan, each step on one mesh dim. A rank outside the mesh gets the same steps as the others.
Steps plan_one_by_one(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                      const Placements& to);
// The plan over several mesh dims at once. nullopt when there is none: for norms and for a new Partial.
std::optional<Steps> plan_at_once(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                                  const Placements& to);
// Computes the movement of a step on a rank of the mesh; null for a step that moves no elements.
std::shared_ptr<const Movement> work_out(const Step& step, const DeviceMesh& mesh);
// Whether a step runs a collective.
inline bool communicates(const Step& step) { return step.kind != Step::Kind::kCut && step.kind != Step::Kind::kSpread; }

// Estimated cost of the greedy plan in microseconds, by PyTorch's cost model; infinite for a shard that would become
// partial. Strategies are compared by this cost, as in PyTorch.
double redistribute_cost(c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
                         const Placements& from, const Placements& to);
double cost_of(const Steps& steps, int64_t item_bytes, const DeviceMesh& mesh);

// A step in progress. After end(), `value` is the result: end() waits for `work` and then calls `finish`, if there is
// one.
struct InFlight {
  at::Tensor value;
  comm::Pending work;
  std::function<at::Tensor()> finish;
  bool pending = false;
  // Waits for the collective and returns the result.
  at::Tensor end();
};

// Runs the steps on this rank's local tensor. COLLECTIVE over the mesh dims of the steps that communicate. The result
// may share memory with `local` only if `may_alias` is set. Dispatch must be below autograd.
at::Tensor run_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias);
// As run_steps, but the last collective may still run on return.
InFlight start_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias);

}  // namespace tessera
