// Sharding rules of operations that read at index tensors: gather, index_select, index, take, bucketize.
#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/rules/views/index_selection.h"

namespace tessera {

namespace {

// Returns a function that runs gather on this rank's shard of self, which is sharded along `dim`. `offset` is the
// global index at which the shard starts, and `in_all` is the global size of `dim`. Results for indices in other ranks'
// shards are set to 0, so the result is Partial(sum).
LocalFunction gather_own(int64_t dim, int64_t offset, int64_t in_all) {
  return [dim, offset, in_all](const LocalCall& local) {
    const at::Tensor self = local.arg(0).toTensor();
    const at::Tensor index = local.arg(2).toTensor();
    check_indices(local.op.name, index, in_all);
    if (self.size(dim) == 0) {
      local.finish({at::zeros(index.sizes(), self.options())});
      return;
    }
    const auto [own, is_remote] = to_local_indices(index, offset, self.size(dim));
    local.finish({at::gather(self, dim, own).masked_fill_(is_remote, 0)});
  };
}

// gather(self, dim, index): a dim other than `dim` may be sharded in self and index if both have the same size in it.
void propose_gather(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const TensorInput& index = call.inputs[1];
  const int64_t gathered = wrap_dim(call.int_at(1), self.dim());
  if (gathered < index.dim()) proposal.strategies.push_back({{Shard(gathered)}, {Replicate(), Shard(gathered)}});
  for (int64_t dim = 0; dim < index.dim(); ++dim) {
    if (dim != gathered && self.sizes[dim] == index.sizes[dim]) {
      proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Shard(dim)}});
    }
  }
  add_pass_through(call, proposal, 0, passes_all);
  proposal.allows_new_shards = true;
  proposal.output(index.sizes);
  // If index has size 1 along `dim`, `dim` of self may be sharded: the rank that holds the element returns it and the
  // other ranks return 0.
  if (index.dim() > 0 && index.dim() == self.dim() && index.sizes[gathered] == 1 && is_sharded_on(self, gathered)) {
    proposal.strategies.push_back({{Partial()}, {Shard(gathered), Replicate()}});
    proposal.supports_strided = false;
    proposal.local = [gathered](const OpCall& of, const PlacementChoice& choice) -> LocalFunction {
      const auto offset = local_offset(of, choice, gathered);
      return offset ? gather_own(gathered, *offset, of.inputs[0].sizes[gathered]) : nullptr;
    };
  }
}

// index_select(self, dim, index)
void propose_index_select(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const TensorInput& index = call.inputs[1];
  const int64_t selected = wrap_dim(call.int_at(1), self.dim());
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (dim == selected && index.dim() == 1) {
      proposal.strategies.push_back({{Shard(dim)}, {Replicate(), Shard(0)}});
    } else if (dim != selected) {
      proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Replicate()}});
    }
  }
  add_pass_through(call, proposal, 0, passes_all);
  std::vector<int64_t> sizes = self.sizes.vec();
  sizes[selected] = c10::multiply_integers(index.sizes);
  proposal.output(sizes);
}

// index(self, indices?): dims of self without an index tensor may be sharded; indexed dims must not be. Dims of the
// index tensors may be sharded if self is replicated.
void propose_index(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const IndexSelection selection = read_selection(call, 1);
  TESSERA_CHECK(!selection.masks, ErrorKind::kShape,
                "[dtensor.dispatch] {}: the shape of a selection by a mask depends on data. Use where, masked_fill or "
                "index tensors, or call it on full_tensor().",
                call.describe());
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (selection.indexed[dim]) continue;
    proposal.strategies.push_back(replicate_rest(call, {{Shard(selection.position(dim))}, {Shard(dim)}}));
  }
  for (int64_t dim = 0; dim < selection.broadcast_dims; ++dim) {
    Strategy strategy{{Shard(selection.front + dim)}, {Replicate()}};
    bool usable = false;
    for (size_t i = 1; i < call.inputs.size(); ++i) {
      const int64_t own = dim - (selection.broadcast_dims - call.inputs[i].dim());
      const bool whole = own < 0 || call.inputs[i].sizes[own] == 1;
      strategy.inputs.push_back(whole ? Replicate() : Shard(own));
      usable = usable || !whole;
    }
    if (usable) proposal.strategies.push_back(std::move(strategy));
  }
  add_pass_through(call, proposal, 0, passes_all);
  proposal.local = [](const OpCall& of, const PlacementChoice& choice) {
    std::vector<CheckedIndex> places;
    for (size_t i = 1; i < of.inputs.size(); ++i) {
      const auto& index = of.inputs[i];
      places.push_back({index.arg, index.element, of.inputs[0].sizes[index.element], /*from_end=*/true});
    }
    return check_indices_if_empty(of, choice, std::move(places));
  };
}

// take(self, index) reads at indices into the flattened self, so self must not be sharded. Dims of index may be
// sharded.
void propose_take(const OpCall& call, Proposal& proposal) {
  const TensorInput& index = call.inputs[1];
  for (int64_t dim = 0; dim < index.dim(); ++dim) {
    proposal.strategies.push_back({{Shard(dim)}, {Replicate(), Shard(dim)}});
  }
  add_pass_through(call, proposal, 0, passes_all);
  proposal.output(index.sizes);
}

// bucketize(self, boundaries) counts the boundaries below each value. If boundaries is sharded, each rank counts its
// own boundaries and the result is Partial(sum). The count increases with the value, so a Partial(max) or Partial(min)
// self gives a result with the same placement.
void propose_bucketize(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Replicate()}});
  }
  proposal.strategies.push_back({{Partial()}, {Replicate(), Shard(0)}});
  add_pass_through(call, proposal, 0, is_extreme);
  proposal.output(self.sizes);
}

}  // namespace

void add_index_rules(RuleTable& table) {
  table.add("aten::gather", propose_gather);
  table.add("aten::index_select", propose_index_select);
  table.add({"aten::index", "aten::_unsafe_index"}, propose_index);
  table.add("aten::take", propose_take);
  table.add({"aten::bucketize.Tensor", "aten::bucketize.Tensor_out"}, propose_bucketize);
}

}  // namespace tessera
