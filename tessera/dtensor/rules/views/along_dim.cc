// Sharding rules of operations along one dim: softmax, cumulative sums, sorts. This dim must not be sharded; the others
// may be.
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// Proposes for each dim except the operation's argument `dim` a shard of this dim in all inputs and outputs, which have
// the same shape.
Rule along_dim(size_t outputs) {
  return [outputs](const OpCall& call, Proposal& proposal) {
    const auto& sizes = call.inputs[0].sizes;
    const int64_t ndim = call.inputs[0].dim();
    const int dim_arg = call.arg_named("dim");
    const int64_t whole = wrap_dim(call.has(dim_arg) ? call.int_at(dim_arg) : -1, ndim);
    for (int64_t dim = 0; dim < ndim; ++dim) {
      if (dim != whole) proposal.strategies.push_back(same_placement(call, Shard(dim)));
    }
    proposal.allows_new_shards = outputs > 1;
    proposal.outputs.assign(outputs, OutputShape{sizes.vec(), {}});
  };
}

// glu(self, dim): the result has half the size along `dim`.
void propose_glu(const OpCall& call, Proposal& proposal) {
  along_dim(1)(call, proposal);
  if (const int64_t ndim = call.inputs[0].dim(); ndim > 0) {
    proposal.outputs[0].sizes[checked_dim(call, call.int_at(1), ndim)] /= 2;
  }
}

// glu_backward(grad, self, dim)
void propose_glu_backward(const OpCall& call, Proposal& proposal) {
  along_dim(1)(call, proposal);
  proposal.outputs[0].sizes = call.inputs[1].sizes.vec();
}

}  // namespace

void add_along_dim_rules(RuleTable& table) {
  table.add({"aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data",
             "aten::_safe_softmax", "aten::cumsum", "aten::cumprod", "aten::logcumsumexp"},
            along_dim(1));
  table.add("aten::glu", propose_glu);
  table.add("aten::glu_backward", propose_glu_backward);
  table.add({"aten::sort", "aten::sort.stable", "aten::cummax", "aten::cummin"}, along_dim(2));
  table.add("aten::topk", [sorted = along_dim(2)](const OpCall& call, Proposal& proposal) {
    sorted(call, proposal);
    if (call.inputs[0].dim() > 0) {
      for (auto& output : proposal.outputs) {
        output.sizes[wrap_dim(call.int_at(2), call.inputs[0].dim())] = call.int_at(1);
      }
    }
  });
}

}  // namespace tessera
