// Sharding rules of convolutions. Batch samples, output channels, input channels (with a Partial result) and groups may
// be sharded. Spatial dims must not be sharded, because a kernel window may cross the border between two shards.
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// Dims of the weight that hold the input and the output channels. The weight has the shape [out, in / groups, ...]; for
// a transposed convolution [in, out / groups, ...].
struct Channels {
  int64_t in;
  int64_t out;
  int64_t groups;
};

Channels read_channels(const OpCall& call) {
  const bool transposed = call.bool_at(call.arg_named("transposed"));
  return {transposed ? 0 : 1, transposed ? 1 : 0, call.int_at(call.arg_named("groups"))};
}

int64_t parts_of(const OpCall& call, const Placements& placements, int64_t dim) {
  int64_t parts = 1;
  for (size_t m = 0; m < placements.size(); ++m) {
    parts *= placements[m].is_any_shard() && placements[m].dim == dim ? call.mesh->shape()[m] : 1;
  }
  return parts;
}

// Whether groups may be sharded. Several mesh dims may shard them, and no group may be divided between ranks, so the
// number of groups must be divisible by the number of ranks of the mesh.
bool groups_divide(const OpCall& call, int64_t groups) { return groups > 1 && groups % call.mesh->size() == 0; }

int64_t local_groups(const OpCall& call, const Placements& input) {
  const int64_t groups = read_channels(call).groups;
  return groups == 1 ? 1 : groups / parts_of(call, input, 1);
}

std::vector<int64_t> result_sizes(const OpCall& call) {
  const auto& input = call.inputs[0].sizes;
  const auto& weight = call.inputs[1].sizes;
  const Channels channels = read_channels(call);
  const auto pick = [&](const char* name, size_t i) { return at_or_single(call.ints_at(call.arg_named(name)), i); };
  const bool transposed = channels.in == 0;
  std::vector<int64_t> sizes{input[0], transposed ? weight[1] * channels.groups : weight[0]};
  for (size_t i = 0; i + 2 < input.size(); ++i) {
    const int64_t span = pick("dilation", i) * (weight[i + 2] - 1) + 1;
    sizes.push_back(transposed ? (input[i + 2] - 1) * pick("stride", i) - 2 * pick("padding", i) + span +
                                     pick("output_padding", i)
                               : (input[i + 2] + 2 * pick("padding", i) - span) / pick("stride", i) + 1);
  }
  return sizes;
}

// convolution(input, weight, bias?, stride, padding, dilation, transposed, output_padding, groups)
void propose_convolution(const OpCall& call, Proposal& proposal) {
  const Channels channels = read_channels(call);
  const auto add = [&](const Placement& output, const Placement& input, const Placement& weight,
                       const Placement& bias) {
    proposal.strategies.push_back(replicate_rest(call, {{output}, {input, weight, bias}}));
  };
  add(Shard(0), Shard(0), Replicate(), Replicate());
  if (channels.groups == 1) {
    add(Shard(1), Replicate(), Shard(channels.out), Shard(0));
    add(Partial(), Shard(1), Shard(channels.in), Partial());
  } else if (groups_divide(call, channels.groups)) {
    add(Shard(1), Shard(1), Shard(0), Shard(0));
  }
  for (const Placement& p : partials_among(call)) {
    if (is_additive(p)) {
      add(p, p, Replicate(), p);
      add(p, Replicate(), p, p);
    }
  }
  proposal.supports_empty_shards = false;
  proposal.supports_strided = false;
  proposal.output(result_sizes(call));
  proposal.rewrite = [](const OpCall& of, const PlacementChoice& choice, const std::vector<OutputShape>&) {
    return Rewrites{{of.arg_named("groups"), local_groups(of, choice.inputs[0])}};
  };
}

// convolution_backward(grad, input, weight, bias_sizes, ...) -> gradients of input, weight and bias
void propose_convolution_backward(const OpCall& call, Proposal& proposal) {
  const Channels channels = read_channels(call);
  proposal.strategies.push_back({{Shard(0), Partial(), Partial()}, {Shard(0), Shard(0), Replicate()}});
  if (channels.groups == 1) {
    proposal.strategies.push_back(
        {{Partial(), Shard(channels.out), Shard(0)}, {Shard(1), Replicate(), Shard(channels.out)}});
    proposal.strategies.push_back(
        {{Shard(1), Shard(channels.in), Replicate()}, {Replicate(), Shard(1), Shard(channels.in)}});
  } else if (groups_divide(call, channels.groups)) {
    proposal.strategies.push_back({{Shard(1), Shard(0), Shard(0)}, {Shard(1), Shard(1), Shard(0)}});
  }
  add_linear(call, proposal, 0);
  proposal.supports_empty_shards = false;
  proposal.supports_strided = false;
  proposal.output(call.inputs[1].sizes);
  proposal.output(call.inputs[2].sizes);
  proposal.output({call.inputs[0].sizes[1]});
  proposal.rewrite = [](const OpCall& of, const PlacementChoice& choice, const std::vector<OutputShape>& shapes) {
    Rewrites rewrites{{of.arg_named("groups"), local_groups(of, choice.inputs[1])}};
    if (of.has(3)) rewrites.emplace_back(3, local_sizes_value(of, shapes[2].sizes, choice.outputs[2]));
    return rewrites;
  };
}

}  // namespace

void add_convolution_rules(RuleTable& table) {
  table.add({"aten::convolution", "aten::convolution_overrideable"}, propose_convolution);
  table.add({"aten::convolution_backward", "aten::convolution_backward_overrideable"}, propose_convolution_backward);
}

}  // namespace tessera
