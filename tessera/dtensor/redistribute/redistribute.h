// Changing the placements of a local tensor: a plan of steps, its cost, and its execution.
//
// A step leads from one division of the tensor (Cuts) to another by one collective over the group of one or of several
// mesh dims, or by none. Planning communicates nothing and gives the same steps on all ranks. A plan is
// torch.distributed.tensor's greedy one, a mesh dim at a time, or, where that would move more, one that takes several
// at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/parts.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

struct Step {
  enum class Kind : uint8_t {
    kCut,            // keeps a part of what is here; no communication
    kSpread,         // whole values become parts that reduce to them; no communication
    kReduce,         // all_reduce
    kReduceScatter,  // `to` has more cuts than `from`, on these mesh dims
    kGather,         // `from` has more cuts than `to`, on these mesh dims
    kExchange,       // all_to_all: any cuts to any others
  };
  Kind kind;
  MeshDims mesh_dims;  // ascending, each of more than one rank
  Cuts from;           // all divisions of the tensor before and after
  Cuts to;
  Sizes global_sizes;
  Placement partial = Replicate();                     // what is reduced, or spread to
  std::shared_ptr<const Movement> movement = nullptr;  // who holds what; worked out by each run when there is none
};
using Steps = c10::SmallVector<Step, 2>;

// The steps that lead from one list of placements to another, in order. None on a rank outside the mesh.
Steps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                        const Placements& to);
// The greedy ones only, each on one mesh dim; on a rank outside the mesh those of the others.
Steps plan_one_by_one(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                      const Placements& to);
// Several mesh dims at once; none when there is no such plan (norms, to Partial).
std::optional<Steps> plan_at_once(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                                  const Placements& to);
// The movement of a step; null where nothing moves. On a rank of the mesh.
std::shared_ptr<const Movement> work_out(const Step& step, const DeviceMesh& mesh);
// Whether a step needs other ranks.
inline bool communicates(const Step& step) { return step.kind != Step::Kind::kCut && step.kind != Step::Kind::kSpread; }

// Estimated microseconds, by upstream's model, of the greedy plan, to compare strategies as upstream does; infinite for
// a shard that would become partial.
double redistribute_cost(c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
                         const Placements& from, const Placements& to);
double cost_of(const Steps& steps, int64_t item_bytes, const DeviceMesh& mesh);

// A step that was started: `value` is its result once `work` has ended and, where there is one, `finish` has made it.
struct InFlight {
  at::Tensor value;
  comm::Pending work;
  std::function<at::Tensor()> finish;
  bool pending = false;
  // Waits.
  at::Tensor end();
};

// Carries out the steps on this rank's part. COLLECTIVE over the mesh dims whose step communicates. The result may
// share memory with `local` only when may_alias is set. Dispatch must be below autograd.
at::Tensor run_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias);
// The same, but the last collective may still be under way.
InFlight start_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias);

}  // namespace tessera
