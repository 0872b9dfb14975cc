// Sharding rules of zeros_like, new_zeros and similar operations, which create tensors with the properties of other
// tensors.
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// zeros_like(self) and similar do not read the values of self. So the result for a Partial self is Replicate, and self
// need not be reduced.
void propose_like(const OpCall& call, Proposal& proposal) {
  const auto& self = call.inputs[0];
  for (int64_t dim = 0; dim < self.dim(); ++dim) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  for (const Placement& p : partials_among(call)) proposal.strategies.push_back({{Replicate()}, {p}});
  proposal.output(self.sizes);
}

// new_zeros(self, size): the result has the shards of self if it has the shape of self, else it is replicated. With
// keep_partial the result may also be Partial, as self is.
void propose_new(const OpCall& call, Proposal& proposal, bool keep_partial) {
  const auto& self = call.inputs[0];
  const std::vector<int64_t> sizes = call.ints_at(call.arg_named("size"));
  PlacementChoice choice{{self.placements}, {self.placements}};
  for (auto& placement : choice.outputs[0]) {
    if (self.sizes != c10::IntArrayRef(sizes) || (placement.is_partial() && !keep_partial)) placement = Replicate();
  }
  const int stride = call.arg_named("stride");
  proposal.outputs.push_back({sizes, call.ints_at(stride)});
  proposal.choice = std::move(choice);
  proposal.rewrite = [stride](const OpCall& of, const PlacementChoice& chosen, const std::vector<OutputShape>& shapes) {
    const Sizes local = local_sizes(shapes[0].sizes, *of.mesh, chosen.outputs[0]);
    Rewrites rewrites{{of.arg_named("size"), c10::List<int64_t>(c10::IntArrayRef(local))}};
    if (of.has(stride)) {
      const Sizes strides = strides_in_order(local, shapes[0].strides);
      rewrites.emplace_back(stride, c10::List<int64_t>(c10::IntArrayRef(strides)));
    }
    return rewrites;
  };
}

}  // namespace

void add_like_rules(RuleTable& table) {
  table.add({"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like"}, propose_like);
  table.add({"aten::new_zeros", "aten::new_ones", "aten::new_full"},
            [](const OpCall& call, Proposal& proposal) { propose_new(call, proposal, false); });
  table.add({"aten::new_empty", "aten::new_empty_strided"},
            [](const OpCall& call, Proposal& proposal) { propose_new(call, proposal, true); });
}

}  // namespace tessera
