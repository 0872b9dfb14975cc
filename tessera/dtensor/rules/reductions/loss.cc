// Sharding rules of the negative log-likelihood loss with sharded batch or spatial dims. loss_parallel.cc has the loss
// for a sharded class dim.
#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// Returns a function that divides the local sum of losses by the total weight of the global batch, so that ignored and
// weighted targets give the same mean as on one device. PyTorch averages the ranks' means, which gives another value.
LocalFunction mean_over(c10::SmallVector<int64_t, 4> mesh_dims) {
  return [mesh_dims = std::move(mesh_dims)](const LocalCall& local) {
    local.arg(3) = static_cast<int64_t>(at::Reduction::Sum);
    local.call();
    const at::Tensor total_weight = torch::jit::pop(local.stack).toTensor().clone();
    const at::Tensor sum = torch::jit::pop(local.stack).toTensor();
    for (const int64_t dim : mesh_dims) {
      comm::all_reduce(*local.mesh.group(dim), total_weight, ReduceOp::kSum, "nll_loss").wait();
    }
    local.stack.emplace_back(sum / total_weight);
    local.stack.emplace_back(total_weight);
  };
}

// nll_loss_forward(self, target, weight?, reduction, ignore_index) -> (output, total_weight)
void propose_nll_loss(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const int64_t reduction = call.int_at(3);
  const bool none = reduction == at::Reduction::None;
  const bool mean = reduction == at::Reduction::Mean;
  // Dim 1 holds the classes; an input of shape [C] has them in dim 0.
  for (int64_t dim = 0; dim < self.dim() && self.dim() > 1; ++dim) {
    if (dim == 1) continue;
    const int64_t target_dim = dim == 0 ? 0 : dim - 1;
    proposal.strategies.push_back(
        replicate_rest(call, {{none ? Shard(target_dim) : Partial(), none || mean ? Replicate() : Partial()},
                              {Shard(dim), Shard(target_dim)}}));
  }
  proposal.output(none ? call.inputs[1].sizes : c10::IntArrayRef{});
  proposal.outputs.push_back({});
  if (mean) {
    proposal.local = [](const OpCall&, const PlacementChoice& choice) -> LocalFunction {
      c10::SmallVector<int64_t, 4> dims;
      for (size_t m = 0; m < choice.inputs[0].size(); ++m) {
        if (choice.inputs[0][m].is_any_shard()) dims.push_back(static_cast<int64_t>(m));
      }
      return dims.empty() ? LocalFunction() : mean_over(std::move(dims));
    };
  }
}

// nll_loss_backward(grad, self, target, weight?, reduction, ignore_index, total_weight)
void propose_nll_loss_backward(const OpCall& call, Proposal& proposal) {
  const bool none = call.int_at(4) == at::Reduction::None;
  const bool reads_total = call.int_at(4) == at::Reduction::Mean;
  const TensorInput& self = call.inputs[1];
  const auto add = [&](Strategy strategy) {
    proposal.strategies.push_back(strategy);
    if (!reads_total) {  // total_weight is not read, so it may keep a Partial
      for (const Placement& p : partials_among(call)) {
        strategy.inputs.back() = p;
        proposal.strategies.push_back(strategy);
      }
    }
  };
  add(replicate_rest(call, {{Replicate()}, {}}));
  for (int64_t dim = 0; dim < self.dim() && self.dim() > 1; ++dim) {
    if (dim == 1) continue;
    const int64_t target_dim = dim == 0 ? 0 : dim - 1;
    const Placement of_gradient = none ? Shard(target_dim) : Replicate();
    add(replicate_rest(call, {{Shard(dim)}, {of_gradient, Shard(dim), Shard(target_dim)}}));
  }
  proposal.output(self.sizes);
}

}  // namespace

void add_loss_rules(RuleTable& table) {
  table.add({"aten::nll_loss_forward", "aten::nll_loss2d_forward"}, propose_nll_loss);
  table.add({"aten::nll_loss_backward", "aten::nll_loss2d_backward"}, propose_nll_loss_backward);
}

}  // namespace tessera
