// Sharding rules of operations that permute, remove, add, slice or repeat dims. Each dim of the input becomes at most
// one dim of the result.
#include <ATen/ATen.h>

#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// For each dim of the first input: the dim of the results that it becomes, or -1 if the input's dim must not be
// sharded.
using DimMap = c10::SmallVector<int64_t, 6>;

// Proposes strategies in which the first input and the results are sharded alike: for each dim of the input that is
// sharded and has map[dim] >= 0, Shard(dim) for the input and Shard(map[dim]) for the results. Also proposes p for the
// input and the results for each of their possible Partial placements p (partials_among()) for which passes(p) is true.
// `passes` is passes_all if the operation only moves values or inserts zeros, and is_additive if the operation adds
// values.
void propose_mapped(const OpCall& call, Proposal& proposal, const DimMap& map,
                    bool (*passes)(const Placement&) = passes_all) {
  const TensorInput& self = call.inputs[0];
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (map[dim] >= 0 && is_sharded_on(self, dim)) proposal.strategies.push_back({{Shard(map[dim])}, {Shard(dim)}});
  }
  add_pass_through(call, proposal, 0, passes);
}

Rule mapped(DimMap (*map)(const OpCall&)) {
  return [map](const OpCall& call, Proposal& proposal) { propose_mapped(call, proposal, map(call)); };
}

DimMap identity(int64_t ndim) {
  DimMap map(ndim);
  for (int64_t i = 0; i < ndim; ++i) map[i] = i;
  return map;
}

DimMap transposed(const OpCall& call) {
  const int64_t ndim = call.inputs[0].dim();
  DimMap map = identity(ndim);
  if (call.args.size() < 3) {  // t()
    if (ndim == 2) std::swap(map[0], map[1]);
  } else if (ndim > 0) {
    std::swap(map[checked_dim(call, call.int_at(1), ndim)], map[checked_dim(call, call.int_at(2), ndim)]);
  }
  return map;
}

DimMap permuted(const OpCall& call) {
  const int64_t ndim = call.inputs[0].dim();
  DimMap map(ndim, -1);
  const auto dims = call.ints_at(1);
  for (size_t i = 0; i < dims.size(); ++i) map[checked_dim(call, dims[i], ndim)] = static_cast<int64_t>(i);
  return map;
}

DimMap with_added(const OpCall& call, int dim_arg) {
  const int64_t ndim = call.inputs[0].dim();
  const int64_t added = checked_dim(call, call.int_at(dim_arg), ndim + 1);
  DimMap map = identity(ndim);
  for (auto& dim : map) dim += dim >= added;
  return map;
}
DimMap unsqueezed(const OpCall& call) { return with_added(call, 1); }

// Returns the DimMap in which dim `gone` must not be sharded. With `removed` the results lack this dim (select,
// unbind); otherwise they have it (slice, split).
DimMap without(const OpCall& call, int64_t gone, bool removed) {
  DimMap map = identity(call.inputs[0].dim());
  map[gone] = -1;
  for (int64_t dim = gone + 1; removed && dim < static_cast<int64_t>(map.size()); ++dim) --map[dim];
  return map;
}

DimMap selected(const OpCall& call, int dim_arg) {
  return without(call, checked_dim(call, call.int_at(dim_arg), call.inputs[0].dim()), true);
}
DimMap selected(const OpCall& call) { return selected(call, 1); }

DimMap along(const OpCall& call, int dim_arg) {
  return without(call, checked_dim(call, call.int_at(dim_arg), call.inputs[0].dim()), false);
}

// Returns the arguments dim1 and dim2 of diagonal and similar operations as non-negative dims.
std::pair<int64_t, int64_t> plane(const OpCall& call, int64_t ndim) {
  return {checked_dim(call, call.int_at(call.arg_named("dim1")), ndim),
          checked_dim(call, call.int_at(call.arg_named("dim2")), ndim)};
}

// Returns for each dim of a tensor of ndim dims the dim that it becomes in the result of diagonal(); -1 for the two
// dims in `plane`. The last dim of the result is the diagonal itself.
DimMap dims_outside_plane(const std::pair<int64_t, int64_t>& plane, int64_t ndim) {
  DimMap map(ndim, -1);
  int64_t next = 0;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (dim != plane.first && dim != plane.second) map[dim] = next++;
  }
  return map;
}

DimMap diagonal(const OpCall& call) {
  const int64_t ndim = call.inputs[0].dim();
  return dims_outside_plane(plane(call, ndim), ndim);
}

// The inverse of diagonal(), for diag_embed and diagonal_backward: for each dim of the diagonal the dim of the full
// tensor that it becomes; -1 for the last dim.
DimMap embedded(const OpCall& call) {
  const int64_t ndim = call.inputs[0].dim() + 1;
  const DimMap there = dims_outside_plane(plane(call, ndim), ndim);
  DimMap back(call.inputs[0].dim(), -1);
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (there[dim] >= 0) back[there[dim]] = dim;
  }
  return back;
}

DimMap sliced(const OpCall& call) {
  const TensorInput& self = call.inputs[0];
  const int64_t dim = checked_dim(call, call.int_at(1), self.dim());
  const bool from_start = !call.has(2) || call.int_at(2) == 0 || call.int_at(2) <= -self.sizes[dim];
  const bool to_end = !call.has(3) || call.int_at(3) >= self.sizes[dim];
  return from_start && to_end && call.int_at(4) == 1 ? identity(self.dim()) : without(call, dim, false);
}

DimMap split_along(const OpCall& call) { return along(call, call.arg_named("dim")); }

DimMap whole_along_dims(const OpCall& call) {
  const int64_t ndim = call.inputs[0].dim();
  DimMap map = identity(ndim);
  if (call.ints_at(call.arg_named("dims")).empty() && call.arg_named("shifts") >= 0) {
    return DimMap(ndim, -1);  // roll without dims rolls the flattened tensor
  }
  for (const int64_t dim : call.ints_at(call.arg_named("dims"))) map[checked_dim(call, dim, ndim)] = -1;
  return map;
}

// flip and roll: the dims that the operation flips or rolls must not be sharded. The result has the shape of the input.
void propose_along_whole_dims(const OpCall& call, Proposal& proposal) {
  propose_mapped(call, proposal, whole_along_dims(call));
  proposal.output(call.inputs[0].sizes);
}

DimMap unbound(const OpCall& call) {
  return without(call, checked_dim(call, call.args.size() > 1 ? call.int_at(1) : 0, call.inputs[0].dim()), true);
}

// squeeze removes only dims of global size 1; a sharded dim of local size 1 stays. So the LocalFunction passes the dims
// explicitly.
void propose_squeeze(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  std::vector<int64_t> candidates = call.ints_at(call.args.size() > 1 ? 1 : -1);
  if (call.args.size() == 1) {
    for (int64_t dim = 0; dim < self.dim(); ++dim) candidates.push_back(dim);
  }
  std::vector<int64_t> gone;
  for (const int64_t dim : candidates) {
    if (self.dim() > 0 && self.sizes[checked_dim(call, dim, self.dim())] == 1) {
      gone.push_back(wrap_dim(dim, self.dim()));
    }
  }
  DimMap map(self.dim(), -1);
  int64_t next = 0;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (std::ranges::find(gone, dim) == gone.end()) map[dim] = next++;
  }
  propose_mapped(call, proposal, map);
  proposal.local = [gone](const OpCall&, const PlacementChoice&) -> LocalFunction {
    return [gone](const LocalCall& local) { local.finish({at::squeeze(local.arg(0).toTensor(), gone)}); };
  };
}

// expand(self, size): a dim that is repeated must not be sharded. The argument size is replaced by the local sizes of
// the result.
void propose_expand(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const auto sizes = call.ints_at(1);
  const auto added = static_cast<int64_t>(sizes.size()) - self.dim();
  DimMap map(self.dim(), -1);
  for (int64_t dim = 0; dim < self.dim() && added >= 0; ++dim) {
    const bool repeated = self.sizes[dim] == 1 && sizes[dim + added] != 1 && sizes[dim + added] != -1;
    map[dim] = repeated ? -1 : dim + added;
  }
  propose_mapped(call, proposal, map);
  proposal.rewrite = with_local_sizes(1);
}

// unfold(self, dim, size, step): the windows become a new last dim. `dim` must not be sharded, unless there is a single
// window as long as `dim`: the window is then the dim itself and may be sharded.
void propose_unfold(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  if (self.dim() == 0) return;
  DimMap map = along(call, 1);
  const int64_t dim = checked_dim(call, call.int_at(1), self.dim());
  const bool whole = call.int_at(2) == self.sizes[dim];
  if (whole) map[dim] = self.dim();
  propose_mapped(call, proposal, map);
  if (whole) {
    proposal.rewrite = [](const OpCall& of, const PlacementChoice& choice, const std::vector<OutputShape>& shapes) {
      return Rewrites{{2, local_sizes(shapes[0].sizes, *of.mesh, choice.outputs[0]).back()}};
    };
  }
}

// Rule of select_backward(grad, input_sizes, dim, ...) and similar, whose result has the shape input_sizes and zeros
// outside the selection. `map` is the DimMap from the gradient to the result. `added` is the number of dims that the
// gradient has more than input_sizes; it may be negative. A gradient with another number of dims must not be sharded,
// because ATen broadcasts it or raises an error.
Rule mapped_back(DimMap (*map)(const OpCall&), int64_t added, bool (*passes)(const Placement&) = passes_all) {
  return [map, added, passes](const OpCall& call, Proposal& proposal) {
    const int64_t ndim = call.inputs[0].dim();
    const bool fits = ndim == static_cast<int64_t>(call.ints_at(1).size()) + added;
    propose_mapped(call, proposal, fits ? map(call) : DimMap(ndim, -1), passes);
    proposal.output(call.ints_at(1));
    proposal.rewrite = with_local_sizes(1);
  };
}

DimMap before_select(const OpCall& call) { return with_added(call, 2); }
DimMap before_slice(const OpCall& call) { return along(call, 2); }

// DimMap of unfold_backward. The last dim of the gradient holds the windows.
DimMap before_unfold(const OpCall& call) {
  const int64_t ndim = call.inputs[0].dim() - 1;
  DimMap map = identity(ndim + 1);
  for (auto& dim : map) {
    if (dim == ndim || dim == wrap_dim(call.int_at(2), ndim)) dim = -1;
  }
  return map;
}

// select_scatter(self, src, ...) and similar operations replace the elements of a view of self by src. So src must have
// the placements that this view of self would have. `map` is the DimMap from self to src.
void propose_scattered(const OpCall& call, Proposal& proposal, const DimMap& map) {
  const TensorInput& self = call.inputs[0];
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (map[dim] >= 0) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Shard(map[dim])}});
  }
  proposal.output(self.sizes);
}

DimMap repeated(const OpCall& call) {
  const TensorInput& self = call.inputs[0];
  const auto repeats = call.ints_at(1);
  const auto added = static_cast<int64_t>(repeats.size()) - self.dim();
  DimMap map(self.dim(), -1);
  for (int64_t dim = 0; dim < self.dim() && added >= 0; ++dim) map[dim] = repeats[dim + added] == 1 ? dim + added : -1;
  return map;
}

// tril(self, diagonal): the global diagonal is a diagonal of the local matrix. So the argument diagonal is increased by
// the shard's row offset and decreased by its column offset.
void propose_triangle(const OpCall& call, Proposal& proposal) {
  propose_mapped(call, proposal, identity(call.inputs[0].dim()));
  proposal.output(call.inputs[0].sizes);
  proposal.supports_strided = false;
  proposal.rewrite = [](const OpCall& of, const PlacementChoice& choice, const std::vector<OutputShape>& shapes) {
    const auto ndim = static_cast<int64_t>(shapes[0].sizes.size());
    if (!of.mesh->coordinate() || ndim < 2) return Rewrites{};
    const LocalBox box = local_box(shapes[0].sizes, *of.mesh, choice.inputs[0]);
    return Rewrites{{1, of.int_at(1) + box.offset[ndim - 2] - box.offset[ndim - 1]}};
  };
}

}  // namespace

void add_dims_rules(RuleTable& table) {
  table.add({"aten::t", "aten::transpose", "aten::t_copy", "aten::transpose_copy"}, mapped(transposed));
  table.add({"aten::permute", "aten::permute_copy"}, mapped(permuted));
  table.add({"aten::unsqueeze", "aten::unsqueeze_copy"}, mapped(unsqueezed));
  table.add({"aten::squeeze", "aten::squeeze_copy"}, propose_squeeze);
  table.add({"aten::select", "aten::select_copy"}, mapped(selected));
  table.add({"aten::slice", "aten::slice_copy"}, mapped(sliced));
  table.add({"aten::split", "aten::split_with_sizes", "aten::split_copy", "aten::split_with_sizes_copy",
             "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk", "aten::chunk"},
            mapped(split_along));
  table.add({"aten::unbind", "aten::unbind_copy"}, mapped(unbound));
  table.add({"aten::expand", "aten::expand_copy"}, propose_expand);
  table.add("aten::flip", [](const OpCall& c, Proposal& p) {
    propose_along_whole_dims(c, p);
    p.has_pointwise_strides = true;
  });
  table.add("aten::roll", propose_along_whole_dims);
  table.add({"aten::tril", "aten::triu"}, propose_triangle);
  table.add({"aten::repeat"}, mapped(repeated));
  table.add("aten::unfold", propose_unfold);
  table.add("aten::unfold_backward", mapped_back(before_unfold, 1, is_additive));
  table.add({"aten::diagonal", "aten::diagonal_copy"}, mapped(diagonal));
  table.add("aten::diag_embed", [](const OpCall& c, Proposal& p) { propose_mapped(c, p, embedded(c)); });
  table.add("aten::diagonal_backward", mapped_back(embedded, -1));
  table.add("aten::select_scatter", [](const OpCall& c, Proposal& p) { propose_scattered(c, p, selected(c, 2)); });
  table.add("aten::slice_scatter", [](const OpCall& c, Proposal& p) { propose_scattered(c, p, along(c, 2)); });
  table.add("aten::diagonal_scatter", [](const OpCall& c, Proposal& p) { propose_scattered(c, p, diagonal(c)); });
  table.add("aten::select_backward", mapped_back(before_select, -1));
  table.add("aten::slice_backward", mapped_back(before_slice, 0));
}

}  // namespace tessera
