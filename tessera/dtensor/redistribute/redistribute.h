// Changing the placements of a local tensor: a plan of single steps, its cost, and its execution.
//
// Planning communicates nothing and gives the same steps on all ranks that take part in them. A plan is
// torch.distributed. tensor's greedy one, or, where that would move more, one with steps over several mesh dims at once
// (wide steps).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera::detail {

// A step over the group of several mesh dims; see redistribute_wide.cc.
struct WideStep {
  enum class Kind : uint8_t {
    kCut,            // keeps a part of what is here; no communication
    kReduce,         // all_reduce
    kReduceScatter,  // `to` has more cuts than `from`, on these mesh dims
    kGather,         // `from` has more cuts than `to`, on these mesh dims
    kExchange,       // all_to_all: any cuts to any others
  };
  Kind kind;
  std::vector<int64_t> mesh_dims;  // ascending
  Cuts from;                       // all divisions of the tensor before and after
  Cuts to;
  Sizes global_sizes;
  ReduceOp op = ReduceOp::kSum;
};

struct Step {
  int64_t mesh_dim;
  Placement from;
  Placement to;
  int64_t size_from;                               // elements of from.dim over this mesh dim; 0 unless from is a shard
  int64_t size_to;                                 // elements of to.dim over this mesh dim; 0 unless to is a shard
  std::shared_ptr<const WideStep> wide = nullptr;  // instead of all this
};
using Steps = c10::SmallVector<Step, 2>;

// The steps that lead from one list of placements to another, in order.
Steps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                        const Placements& to);
// The greedy ones only, each on one mesh dim.
Steps plan_greedily(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                    const Placements& to);
// Wide ones; none when there is no such plan (norms, to Partial).
std::optional<Steps> plan_widely(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                                 const Placements& to);
// Whether a step needs other ranks.
bool communicates(const Step& step, const DeviceMesh& mesh);

// Estimated microseconds of upstream's plan, to compare strategies as upstream does; infinite for a shard that would
// become partial.
double redistribute_cost(c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
                         const Placements& from, const Placements& to);
// Of given steps from placements that divide the tensor as `from` does.
double cost_of(const Steps& steps, c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
               const Placements& from);

// A step that was started: `value` is its result once `work` has ended and, where there is one, `finish` has made it.
struct InFlight {
  at::Tensor value;
  comm::Pending work;
  std::function<at::Tensor()> finish;
  bool pending = false;
  // Waits.
  at::Tensor end();
};
InFlight start_wide(const at::Tensor& local, const DeviceMesh& mesh, const WideStep& step);
// What follows the collective of a step is done by `then` when it has ended.
InFlight with(InFlight started, std::function<at::Tensor(const at::Tensor&)> then);

// Carries out the steps on this rank's part. COLLECTIVE over the mesh dims whose step communicates. The result may
// share memory with `local` only when may_alias is set. Dispatch must be below autograd.
at::Tensor run_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias);
// The same, but the last collective may still be under way.
InFlight start_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias);

// All-reduce and reduce-scatter of booleans travel as bytes: any() is a sum, all() a product.
ReduceOp byte_op(ReduceOp op);

}  // namespace tessera::detail
