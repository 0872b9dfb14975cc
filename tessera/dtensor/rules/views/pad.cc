// Sharding rules of padding. Padded dims must not be sharded; the other dims may be.
#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// Returns for each dim whether the pad list changes its size. The list has a pair (before, after) for each dim, from
// the last dim backwards.
std::vector<bool> padded_dims(const OpCall& call, int pad_arg, int64_t ndim) {
  const auto pad = call.ints_at(pad_arg);
  TESSERA_CHECK(static_cast<int64_t>(pad.size()) <= 2 * ndim, ErrorKind::kShape,
                "[dtensor.dispatch] {}: found {} numbers in the padding, wanted at most {}, two a dim.",
                call.describe(), pad.size(), 2 * ndim);
  std::vector<bool> padded(ndim, false);
  for (size_t i = 0; i < pad.size(); ++i) {
    if (pad[i] != 0) padded[ndim - 1 - static_cast<int64_t>(i / 2)] = true;
  }
  return padded;
}

std::vector<int64_t> padded_sizes(const OpCall& call, int pad_arg) {
  std::vector<int64_t> sizes = call.inputs[0].sizes.vec();
  const auto pad = call.ints_at(pad_arg);
  for (size_t i = 0; i < pad.size(); ++i) sizes[sizes.size() - 1 - i / 2] += pad[i];
  return sizes;
}

// constant_pad_nd(self, pad, value): all ranks fill in the same value. So self and the result may be Partial only if
// the reduction of equal values gives the value: avg, max and min, or sum if value is 0.
void propose_constant(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const auto padded = padded_dims(call, 1, self.dim());
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!padded[dim]) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  }
  const bool unchanged = std::ranges::find(padded, true) == padded.end();
  const auto value = call.args[2].toScalar();
  const bool zero = !value.isComplex() && value.toDouble() == 0;
  for (const Placement& p : partials_among(call)) {
    const bool passes = unchanged || is_idempotent(p) || (zero && p.is_partial(ReduceOp::kSum));
    if (passes) proposal.strategies.push_back({{p}, {p}});
  }
  proposal.output(padded_sizes(call, 1));
}

// reflection_pad2d(self, padding) and similar only copy values, so a self with any Partial placement gives a result
// with this placement.
void propose_copying(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const int64_t outer = self.dim() - static_cast<int64_t>(call.ints_at(1).size() / 2);
  for (int64_t dim = 0; dim < outer; ++dim) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  add_pass_through(call, proposal, 0, passes_all);
  proposal.supports_empty_shards = false;
  proposal.output(padded_sizes(call, 1));
}

// reflection_pad2d_backward(grad, self, padding)
void propose_copying_backward(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[1];
  const int64_t outer = self.dim() - static_cast<int64_t>(call.ints_at(2).size() / 2);
  for (int64_t dim = 0; dim < outer; ++dim) proposal.strategies.push_back(same_placement(call, Shard(dim)));
  add_linear(call, proposal, 0);
  proposal.supports_empty_shards = false;
  proposal.output(self.sizes);
}

}  // namespace

void add_pad_rules(RuleTable& table) {
  table.add("aten::constant_pad_nd", propose_constant);
  table.add({"aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d", "aten::replication_pad1d",
             "aten::replication_pad2d", "aten::replication_pad3d"},
            propose_copying);
  table.add(
      {"aten::reflection_pad1d_backward", "aten::reflection_pad2d_backward", "aten::reflection_pad3d_backward",
       "aten::replication_pad1d_backward", "aten::replication_pad2d_backward", "aten::replication_pad3d_backward"},
      propose_copying_backward);
}

}  // namespace tessera
