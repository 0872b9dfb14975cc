// Sharding rules of operations that write at index tensors: scatter, index_put, index_add, put.
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/rules/views/index_selection.h"

namespace tessera {

namespace {

// scatter(self, dim, index, src or value), scatter_add: a dim other than `dim` may be sharded in all tensors if all
// have the same size in it.
void propose_scatter(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const int64_t dim_written = wrap_dim(call.int_at(1), self.dim());
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const bool same_size = std::ranges::all_of(call.inputs, [&](const TensorInput& input) {
      return input.dim() == self.dim() && input.sizes[dim] == self.sizes[dim];
    });
    if (dim != dim_written && same_size) proposal.strategies.push_back(same_placement(call, Shard(dim)));
  }
  proposal.allows_new_shards = true;
  proposal.output(self.sizes);
}

// index_put(self, indices, values, accumulate): dims of self without an index tensor may be sharded. Replacing and
// adding are linear in self and values, so if both are Partial(sum), the result is Partial(sum).
void propose_index_put(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const IndexSelection selection = read_selection(call, 1);
  const int values_at = call.input_at(2);
  const TensorInput& values = call.inputs[values_at];
  for (int64_t dim = 0; dim < self.dim() && !selection.masks; ++dim) {
    if (selection.indexed[dim]) continue;
    const int64_t own = selection.position(dim) - (selection.dims() - values.dim());
    Strategy strategy = replicate_rest(call, {{Shard(dim)}, {Shard(dim)}});
    if (own >= 0 && values.sizes[own] != 1) strategy.inputs[values_at] = Shard(own);
    proposal.strategies.push_back(std::move(strategy));
  }
  for (const Placement& p : partials_among(call)) {
    if (is_additive(p)) {
      Strategy strategy = pass_through(p, 0, call.inputs.size());
      strategy.inputs[values_at] = p;
      proposal.strategies.push_back(std::move(strategy));
    }
  }
  proposal.output(self.sizes);
  proposal.local = [masks = selection.masks](const OpCall& of, const PlacementChoice& choice) {
    std::vector<CheckedIndex> places;
    for (size_t i = 1; i < of.inputs.size() && !masks; ++i) {
      const auto& index = of.inputs[i];
      if (index.arg == 1 && index.element < of.inputs[0].dim()) {
        places.push_back({1, index.element, of.inputs[0].sizes[index.element], /*from_end=*/true});
      }
    }
    return check_indices_if_empty(of, choice, std::move(places));
  };
}

// Proposes the sharding strategies of index_add(self, dim, index, source) and similar operations. Dims other than `dim`
// may be sharded. For each Partial placement p of an input for which passes(p) returns true, self, source and the
// result may all have the placement p.
void propose_along_index(const OpCall& call, Proposal& proposal, bool (*passes)(const Placement&)) {
  const TensorInput& self = call.inputs[0];
  const int64_t written = wrap_dim(call.int_at(1), self.dim());
  const size_t count = call.inputs.size();
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (dim == written) continue;
    Strategy strategy{{Shard(dim)}, {Shard(dim), Replicate()}};
    if (count > 2) {  // source has self's shape, except along `written`
      strategy.inputs.push_back(call.inputs[2].dim() == self.dim() ? Shard(dim) : Replicate());
    }
    proposal.strategies.push_back(std::move(strategy));
  }
  for (const Placement& p : partials_among(call)) {
    if (passes(p)) {
      Strategy strategy{{p}, {p, Replicate()}};
      strategy.inputs.resize(count, p);
      proposal.strategies.push_back(std::move(strategy));
    }
  }
  proposal.output(self.sizes);
  if (self.dim() > 0) {
    const bool fills = call.name().find("index_fill") != std::string::npos;
    proposal.local = [fills, size = self.sizes[written]](const OpCall& of, const PlacementChoice& choice) {
      return check_indices_if_empty(of, choice, {{2, -1, size, /*from_end=*/fills}});
    };
  }
}

Rule along_index(bool (*passes)(const Placement&)) {
  return [passes](const OpCall& call, Proposal& proposal) { propose_along_index(call, proposal, passes); };
}

bool none(const Placement&) { return false; }

// put and masked_scatter write to positions of the flattened tensor. The rule proposes no strategy, so all tensors are
// replicated.
void propose_whole(const OpCall& call, Proposal& proposal) { proposal.output(call.inputs[0].sizes); }

}  // namespace

void add_index_write_rules(RuleTable& table) {
  table.add({"aten::scatter", "aten::scatter_add", "aten::scatter_reduce"}, propose_scatter);
  table.add({"aten::index_put", "aten::_index_put_impl", "aten::_index_put_impl_", "aten::_unsafe_index_put"},
            propose_index_put);
  table.add("aten::index_add", along_index(is_additive));
  table.add("aten::index_copy", along_index(passes_all));
  table.add("aten::index_reduce", along_index(none));
  table.add("aten::index_fill", along_index(is_idempotent));
  table.add({"aten::index_fill.int_Tensor", "aten::index_fill_.int_Tensor", "aten::index_fill.int_Tensor_out"},
            along_index(passes_all));
  table.add({"aten::put", "aten::masked_scatter"}, propose_whole);
}

}  // namespace tessera
