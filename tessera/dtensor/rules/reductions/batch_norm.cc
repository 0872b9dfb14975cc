// Sharding rules of batch norm and group norm. Batch norm: channels are independent. In training a sharded batch dim is
// gathered, because the mean over all samples is needed; in evaluation it may stay sharded. Running statistics keep
// their placements: the operation updates copies that are sharded like the channels, and the new values are
// redistributed back. Group norm: samples are independent.
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

bool is_training(const OpCall& call) {
  for (const char* name : {"training", "train", "update"}) {
    if (const int arg = call.arg_named(name); arg >= 0) return call.bool_at(arg);
  }
  return call.name().find("no_training") == std::string::npos && call.name().find("no_update") == std::string::npos;
}

bool has_channels(const TensorInput& input) { return input.dim() != 1; }

// Returns the placement of a tensor with one element for each channel (weight, bias, statistics) if channels are
// sharded. A statistic without elements, as in evaluation, is not sharded.
Placement of_channels(const TensorInput& input) {
  return input.sizes[0] == 0 && !is_sharded_on(input, 0) ? Replicate() : Shard(0);
}

Strategy over_channels(const OpCall& call, size_t images, size_t statistics) {
  Strategy strategy;
  strategy.outputs.assign(images, Shard(1));
  strategy.outputs.resize(images + statistics, Shard(0));
  for (const auto& input : call.inputs) strategy.inputs.push_back(has_channels(input) ? Shard(1) : of_channels(input));
  return strategy;
}

// Adds the strategies for evaluation, when the statistics are inputs: all elements are then independent, so every dim
// but the channels may be sharded, too.
void add_over_elements(const OpCall& call, Proposal& proposal, const Placement& of_statistics, size_t outputs) {
  for (int64_t dim = 0; dim < call.inputs[0].dim(); ++dim) {
    if (dim != 1) {
      Strategy strategy{{Shard(dim)}, {}};
      strategy.outputs.resize(outputs, of_statistics);
      for (const auto& input : call.inputs) strategy.inputs.push_back(has_channels(input) ? Shard(dim) : Replicate());
      proposal.strategies.push_back(std::move(strategy));
    }
  }
}

// Changes every strategy so that running statistics that the operation writes keep their present placement on each mesh
// dim.
void keep_written(const OpCall& call, Proposal& proposal) {
  for (int64_t m = 0; m < call.mesh->ndim(); ++m) {
    std::vector<Strategy> strategies = proposal.strategies;
    strategies.insert(strategies.begin(), replicate_rest(call, {{Replicate()}, {}}));
    for (auto& strategy : strategies) {
      for (size_t i = 0; i < call.inputs.size(); ++i) {
        if (call.inputs[i].is_written && !call.inputs[i].placements[m].is_partial()) {
          strategy.inputs[i] = call.inputs[i].placements[m];
        }
      }
    }
    proposal.by_mesh_dim.push_back(std::move(strategies));
  }
}

struct MovedStatistic {
  int arg;
  RedistributeSteps there;
  RedistributeSteps back;
};

// Returns a function that redistributes the running statistics to be sharded like the channels, runs the operation, and
// redistributes the new statistics back. Null if no statistic has to be redistributed.
LocalFunction with_moved_statistics(const OpCall& call, const PlacementChoice& choice) {
  Placements wanted = choice.inputs[0];
  for (auto& placement : wanted) {
    if (placement.is_any_shard() && placement.dim == 1) {
      placement.dim = 0;
    } else {
      placement = Replicate();
    }
  }
  std::vector<MovedStatistic> moved;
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorInput& input = call.inputs[i];
    if (input.is_written && choice.inputs[i] != wanted) {
      moved.push_back({input.arg, plan_redistribute(input.sizes, *call.mesh, choice.inputs[i], wanted),
                       plan_redistribute(input.sizes, *call.mesh, wanted, choice.inputs[i])});
    }
  }
  if (moved.empty()) return nullptr;
  return [moved = std::move(moved)](const LocalCall& local) {
    std::vector<std::pair<at::Tensor, at::Tensor>> statistics;  // (tensor that is written, redistributed copy)
    for (const auto& each : moved) {
      const at::Tensor kept = local.arg(each.arg).toTensor();
      statistics.emplace_back(kept, run_redistribute(kept, local.mesh, each.there, /*may_alias=*/true));
      local.arg(each.arg) = statistics.back().second;
    }
    local.call();
    for (size_t i = 0; i < moved.size(); ++i) {
      statistics[i].first.copy_(run_redistribute(statistics[i].second, local.mesh, moved[i].back, /*may_alias=*/true));
    }
  };
}

// native_batch_norm(input, weight?, bias?, running_mean?, running_var?, ...) -> (output, save_mean, save_invstd). Some
// variants also return a workspace.
Rule forward(size_t outputs) {
  return [outputs](const OpCall& call, Proposal& proposal) {
    const bool training = is_training(call);
    Strategy channels = over_channels(call, 1, 2);
    channels.outputs.resize(outputs, Replicate());
    proposal.strategies.push_back(std::move(channels));
    if (!training) add_over_elements(call, proposal, Replicate(), outputs);
    if (std::ranges::any_of(call.inputs, [](const TensorInput& input) { return input.is_written; })) {
      keep_written(call, proposal);
      proposal.local = with_moved_statistics;
    }
    proposal.supports_empty_shards = false;
    const auto& sizes = call.inputs[0].sizes;
    proposal.output(sizes);
    proposal.outputs.resize(3, OutputShape{{training ? sizes[1] : 0}, {}});
    proposal.outputs.resize(outputs, OutputShape{{0}, {}});
  };
}

// native_batch_norm_backward(grad, input, weight?, ...) -> gradients of input, weight and bias
void propose_batch_norm_backward(const OpCall& call, Proposal& proposal) {
  proposal.strategies.push_back(over_channels(call, 1, 2));
  if (!is_training(call)) add_over_elements(call, proposal, Partial(), 3);
  proposal.supports_empty_shards = false;
  const auto& sizes = call.inputs[1].sizes;
  proposal.output(sizes);
  proposal.output({sizes[1]});
  proposal.output({sizes[1]});
}

// reserveSpace is the workspace that the fused forward kernel saved, a byte tensor. Each rank uses the workspace of its
// own forward, so it counts as Replicate and is never redistributed.
void propose_cudnn_backward(const OpCall& call, Proposal& proposal) {
  propose_batch_norm_backward(call, proposal);
  const int reserve = call.input_at(call.arg_named("reserveSpace"));
  for (auto& strategy : proposal.strategies) {
    if (reserve >= 0) strategy.inputs[reserve] = Replicate();
  }
}

// native_group_norm(input, weight?, bias?, N, C, HxW, group, eps) -> (output, mean, rstd)
void propose_group_norm(const OpCall& call, Proposal& proposal) {
  proposal.strategies.push_back(replicate_rest(call, {{Shard(0)}, {Shard(0)}}));
  proposal.supports_empty_shards = false;
  proposal.output(call.inputs[0].sizes);
  proposal.outputs.resize(3, OutputShape{{call.int_at(3), call.int_at(6)}, {}});
  proposal.rewrite = [](const OpCall& of, const PlacementChoice& choice, const std::vector<OutputShape>& shapes) {
    return Rewrites{{3, local_sizes(shapes[0].sizes, *of.mesh, choice.outputs[0])[0]}};
  };
}

// native_group_norm_backward(grad, input, mean, rstd, weight?, N, C, HxW, group, mask) -> gradients of input, weight,
// bias
void propose_group_norm_backward(const OpCall& call, Proposal& proposal) {
  proposal.strategies.push_back(
      replicate_rest(call, {{Shard(0), Partial(), Partial()}, {Shard(0), Shard(0), Shard(0), Shard(0)}}));
  proposal.supports_empty_shards = false;
  proposal.output(call.inputs[1].sizes);
  proposal.outputs.resize(3, OutputShape{{call.int_at(6)}, {}});
  proposal.rewrite = [](const OpCall& of, const PlacementChoice& choice, const std::vector<OutputShape>& shapes) {
    return Rewrites{{5, local_sizes(shapes[0].sizes, *of.mesh, choice.outputs[0])[0]}};
  };
}

}  // namespace

void add_batch_norm_rules(RuleTable& table) {
  table.add({"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training",
             "aten::miopen_batch_norm"},
            forward(3));
  table.add({"aten::_batch_norm_with_update", "aten::_batch_norm_no_update", "aten::cudnn_batch_norm"}, forward(4));
  table.add({"aten::native_batch_norm_backward"}, propose_batch_norm_backward);
  table.add({"aten::cudnn_batch_norm_backward", "aten::batch_norm_backward"}, propose_cudnn_backward);
  table.add("aten::native_group_norm", propose_group_norm);
  table.add("aten::native_group_norm_backward", propose_group_norm_backward);
}

}  // namespace tessera
