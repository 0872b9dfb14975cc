// Sharding rules of losses that are a sum or mean over elements: each element of input and target gives one summand.
#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

#include "tessera/dtensor/rules/elementwise/pointwise.h"

namespace tessera {

namespace {

int reduction_arg(const OpCall& call) { return call.arg_named("reduction"); }

double elements(const OpCall& call) { return static_cast<double>(c10::multiply_integers(broadcast_sizes(call))); }

// mse_loss(self, target, reduction). For a mean each rank divides the sum over its local elements by the global number
// of elements. The result is Partial(sum) and is correct for uneven shards, too.
void propose_loss(const OpCall& call, Proposal& proposal) {
  propose_pointwise(call, proposal, PartialRule::kNone);
  const int64_t reduction = call.int_at(reduction_arg(call));
  if (reduction == at::Reduction::None) return;
  for (auto& strategy : proposal.strategies) strategy.outputs = {Partial()};
  proposal.outputs = {OutputShape{}};
  if (reduction == at::Reduction::Mean) {
    proposal.local = [](const OpCall& of, const PlacementChoice& choice) -> LocalFunction {
      const auto& output = choice.outputs[0];
      const bool is_part = std::ranges::any_of(output, [](const Placement& p) { return p.is_partial(); });
      if (!output.empty() && !is_part) return nullptr;
      return [arg = reduction_arg(of), total = elements(of)](const LocalCall& local) {
        local.arg(arg) = static_cast<int64_t>(at::Reduction::Sum);
        local.call();
        local.stack.back() = local.stack.back().toTensor() / total;
      };
    };
  }
}

// mse_loss_backward(grad, self, target, ..., reduction, ...). For a mean the gradient is divided by the global number
// of elements, not by the number of local elements.
void propose_loss_backward(const OpCall& call, Proposal& proposal) {
  const int64_t reduction = call.int_at(reduction_arg(call));
  std::vector<TensorInput> operands(call.inputs.begin() + 1, call.inputs.end());
  const OpCall of_operands(call.op, call.args, call.mesh, std::move(operands), call.outs);
  const Sizes sizes = broadcast_sizes(of_operands);
  const auto ndim = static_cast<int64_t>(sizes.size());
  for (int64_t dim = 0; dim < ndim; ++dim) proposal.strategies.push_back(shard_broadcast_dim(call, sizes, dim));
  proposal.output(sizes);
  if (reduction == at::Reduction::Mean) {
    const auto total = static_cast<double>(c10::multiply_integers(sizes));
    proposal.local = [total](const OpCall& of, const PlacementChoice& choice) -> LocalFunction {
      const bool is_sharded =
          std::ranges::any_of(choice.outputs[0], [](const Placement& p) { return p.is_any_shard(); });
      if (!is_sharded) return nullptr;
      return [arg = reduction_arg(of), total](const LocalCall& local) {
        local.arg(arg) = static_cast<int64_t>(at::Reduction::Sum);
        local.arg(0) = local.arg(0).toTensor() / total;
        local.call();
      };
    };
  }
}

}  // namespace

void add_elementwise_loss_rules(RuleTable& table) {
  table.add({"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::binary_cross_entropy",
             "aten::soft_margin_loss"},
            propose_loss);
  table.add({"aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward",
             "aten::binary_cross_entropy_backward", "aten::soft_margin_loss_backward"},
            propose_loss_backward);
}

}  // namespace tessera
