// Sharding rules of layer norm and RMS norm. The normalized dims must not be sharded; the dims before them may be.
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

int64_t outer_dims(const OpCall& call, int shape_arg, const TensorInput& input) {
  return input.dim() - static_cast<int64_t>(call.ints_at(shape_arg).size());
}

std::vector<int64_t> statistics_sizes(const TensorInput& input, int64_t outer) {
  std::vector<int64_t> sizes = input.sizes.vec();
  std::fill(sizes.begin() + outer, sizes.end(), 1);
  return sizes;
}

// native_layer_norm(input, normalized_shape, weight?, bias?, eps) -> (output, mean, rstd). _fused_rms_norm has no bias
// and returns no mean.
Rule forward(size_t statistics) {
  return [statistics](const OpCall& call, Proposal& proposal) {
    const TensorInput& input = call.inputs[0];
    const int64_t outer = outer_dims(call, 1, input);
    for (int64_t dim = 0; dim < outer; ++dim) {
      proposal.strategies.push_back(replicate_rest(call, {{Shard(dim)}, {Shard(dim)}}));
    }
    proposal.output(input.sizes);
    for (size_t i = 0; i < statistics; ++i) proposal.output(statistics_sizes(input, outer));
  };
}

// native_layer_norm_backward(grad, input, normalized_shape, mean, rstd, weight?, bias?, mask) -> (input, weight, bias)
// _fused_rms_norm_backward(grad, input, normalized_shape, rstd, weight?, mask) -> (input, weight)
Rule backward(size_t parameters) {
  return [parameters](const OpCall& call, Proposal& proposal) {
    const TensorInput& input = call.inputs[1];
    const int64_t outer = outer_dims(call, 2, input);
    const int weight_arg = call.arg_named("weight");
    const int bias_arg = call.arg_named("bias");
    for (int64_t dim = 0; dim < outer; ++dim) {
      Strategy strategy{{Shard(dim)}, {}};
      strategy.outputs.resize(1 + parameters, Partial());
      for (const auto& each : call.inputs) {
        strategy.inputs.push_back(each.arg == weight_arg || each.arg == bias_arg ? Replicate() : Shard(dim));
      }
      proposal.strategies.push_back(std::move(strategy));
    }
    proposal.output(input.sizes);
    const std::vector<int64_t> parameter_sizes = call.ints_at(2);
    for (size_t i = 0; i < parameters; ++i) proposal.output(parameter_sizes);
  };
}

}  // namespace

void add_norm_layer_rules(RuleTable& table) {
  table.add("aten::native_layer_norm", forward(2));
  table.add("aten::native_layer_norm_backward", backward(2));
  table.add("aten::_fused_rms_norm", forward(1));
  table.add("aten::_fused_rms_norm_backward", backward(1));
}

}  // namespace tessera
