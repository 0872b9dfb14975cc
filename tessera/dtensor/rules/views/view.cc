// Sharding rules of view, reshape and similar operations, which change the shape. As in PyTorch's rules, input dims and
// output dims are matched in groups of consecutive dims whose sizes have the same product.
#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// A group: consecutive input dims `from` that become consecutive output dims `to`. A group with several dims leaves out
// dims of size 1.
struct DimGroup {
  c10::SmallVector<int64_t, 4> from;
  c10::SmallVector<int64_t, 4> to;
};

// Divides the dims of a view into groups. At both ends of the shapes, each pair of an input dim and an output dim of
// equal size is a group. Between them a group takes dims on the side with the smaller product of sizes until both
// products are equal.
class ViewMap {
 public:
  ViewMap(c10::IntArrayRef from, c10::IntArrayRef to) : from_(from), to_(to) {
    size_t first = 0;
    while (first < from.size() && first < to.size() && from[first] == to[first]) {
      groups_.push_back({{static_cast<int64_t>(first)}, {static_cast<int64_t>(first)}});
      ++first;
    }
    size_t from_end = from.size();
    size_t to_end = to.size();
    while (from_end > first && to_end > first && from[from_end - 1] == to[to_end - 1]) {
      --from_end;
      --to_end;
      groups_.push_back({{static_cast<int64_t>(from_end)}, {static_cast<int64_t>(to_end)}});
    }
    match(first, from_end, first, to_end);
  }

  const DimGroup* group_of(int64_t dim) const {
    for (const auto& group : groups_) {
      if (std::ranges::find(group.from, dim) != group.from.end()) return &group;
    }
    return nullptr;
  }

 private:
  void match(size_t i, size_t i_end, size_t j, size_t j_end) {
    while (i < i_end || j < j_end) {
      DimGroup group;
      int64_t a = 1;
      int64_t b = 1;
      const auto take = [](c10::IntArrayRef sizes, size_t& at, int64_t& product, auto& dims) {
        product *= sizes[at];
        if (sizes[at] != 1) dims.push_back(static_cast<int64_t>(at));
        ++at;
      };
      do {
        if (i < i_end && (a <= b || j == j_end)) {
          take(from_, i, a, group.from);
        } else if (j < j_end) {
          take(to_, j, b, group.to);
        }
      } while (a != b && (i < i_end || j < j_end));
      while (group.to.empty() && j < j_end && to_[j] == 1) ++j;
      groups_.push_back(std::move(group));
    }
  }

  c10::IntArrayRef from_;
  c10::IntArrayRef to_;
  c10::SmallVector<DimGroup, 6> groups_;
};

using Describe = std::function<std::string()>;  // describes the operation for messages

class ViewPlacements {
 public:
  ViewPlacements(const DeviceMesh& mesh, c10::IntArrayRef from, c10::IntArrayRef to, const Placements& now,
                 Describe describe)
      : mesh_(mesh), from_(from), to_(to), now_(now), map_(from_, to), describe_(std::move(describe)) {}
  ViewPlacements(const OpCall& call, c10::IntArrayRef to, const Placements& now)
      : ViewPlacements(*call.mesh, call.inputs[0].sizes, to, now, [&call] { return call.describe(); }) {}

  // Returns the placements of the result. Error kShape if the view is not possible without redistributing the input.
  Placements result() const {
    Placements placements;
    for (size_t m = 0; m < now_.size(); ++m) {
      placements.push_back(now_[m].is_any_shard() ? moved(static_cast<int64_t>(m)) : now_[m]);
    }
    return placements;
  }

 private:
  // Returns the product of the sizes of the mesh dims before `until` that shard one of the input dims `dims`.
  int64_t parts_of(c10::ArrayRef<int64_t> dims, int64_t until) const {
    int64_t parts = 1;
    for (int64_t m = 0; m < until; ++m) {
      const Placement& p = now_[m];
      if (p.is_any_shard() && std::ranges::find(dims, p.dim) != dims.end()) parts *= mesh_.shape()[m];
    }
    return parts;
  }

  // Returns the placement of the result on mesh dim m. The input's placement on m is a shard of an input dim. If the
  // DimGroup of this input dim has only one input dim and one output dim, the output dim is sharded in the same way. In
  // a larger DimGroup a Shard has two cases. If it shards the first input dim of the group, evenly, the result has a
  // Shard of the group's first output dim. If it shards a later input dim and the group has one output dim, the result
  // has a StridedShard.
  Placement moved(int64_t m) const {
    const Placement& placement = now_[m];
    const int64_t dim = placement.dim;
    const DimGroup* group = map_.group_of(dim);
    if (group == nullptr || group->to.empty()) {
      fail_flatten(m);  // a dim of size 1 is removed
    }
    if (group->from.size() == 1 && group->to.size() == 1) {
      Placement same = placement;
      same.dim = static_cast<int32_t>(group->to[0]);
      return same;
    }
    const int64_t all_parts = parts_of({dim}, mesh_.ndim());
    const bool flattens = group->to.size() == 1;
    if (placement.is_strided_shard()) {
      return flattens && dim == group->from[0] ? flattened_strided(m, *group, all_parts)
                                               : unflattened_strided(m, *group);
    }
    if (dim == group->from[0]) {
      if (from_[dim] % all_parts != 0) fail_flatten(m);
      if (to_[group->to[0]] % all_parts != 0) fail_unflatten(m, group->to[0]);
      return Shard(group->to[0]);
    }
    if (!flattens) fail_unflatten(m, group->to[0]);
    // Here `dim` is not the first input dim of its DimGroup, and all input dims of the DimGroup are flattened into one
    // output dim. A rank then holds several pieces of the output dim: one piece for each combination of the indices
    // that it has in the input dims of the DimGroup before `dim`.
    if (dim != group->from.back() && from_[dim] % all_parts != 0) fail_flatten(m);
    c10::SmallVector<int64_t, 4> outer;
    int64_t pieces = 1;
    for (const int64_t d : group->from) {
      if (d == dim) break;
      outer.push_back(d);
      pieces *= from_[d];
    }
    const int64_t outer_parts = parts_of(outer, m);
    if (pieces % outer_parts != 0) fail_flatten(m);
    // For a tensor without elements `pieces` may be 0, but a split factor must be at least 1.
    return StridedShard(group->to[0], std::max<int64_t>(pieces / outer_parts, 1));
  }

  Placement flattened_strided(int64_t m, const DimGroup& group, int64_t all_parts) const {
    const int64_t factor = now_[m].split_factor;
    if (from_[now_[m].dim] % (factor * all_parts) != 0) fail_flatten(m);
    return StridedShard(group.to[0], factor);
  }

  // Returns the placement of a StridedShard after its dim is unflattened: a Shard of the output dim for which the
  // product of the sizes of the output dims before it equals the number of pieces of the StridedShard.
  Placement unflattened_strided(int64_t m, const DimGroup& group) const {
    const int64_t factor = now_[m].split_factor;
    if (group.from.size() == 1) {
      int64_t pieces = 1;
      for (size_t i = 0; i < group.to.size(); ++i) {
        const int64_t dim = group.to[i];
        if (pieces == factor * parts_before(m, group, i)) {
          const bool last = i + 1 == group.to.size();
          const int64_t parts = parts_before(m, group, i + 1) / parts_before(m, group, i) * mesh_.shape()[m];
          if (!last && to_[dim] % parts != 0) fail_unflatten(m, dim);
          return Shard(dim);
        }
        pieces *= to_[dim];
      }
    }
    fail_unflatten(m, group.to[0]);
  }

  // Considers the mesh dims before `until` that shard the input dim group.from[0], and that shard one of the first
  // `count` dims of group.to in the output. Returns the product of the sizes of these mesh dims.
  int64_t parts_before(int64_t until, const DimGroup& group, size_t count) const {
    int64_t parts = 1;
    for (int64_t m = 0; m < until; ++m) {
      if (now_[m].is_any_shard() && now_[m].dim == group.from[0]) {
        const auto end = group.to.begin() + static_cast<int64_t>(count);
        parts *= std::find(group.to.begin(), end, moved(m).dim) != end ? mesh_.shape()[m] : 1;
      }
    }
    return parts;
  }

  [[noreturn]] void fail_flatten(int64_t m) const {
    raise(ErrorKind::kShape,
          "Sharding dimension mismatch: [dtensor.dispatch] {} to [{}]: Cannot flatten unevenly sharded tensor: "
          "dimension {} (size {}) is not evenly "
          "divisible by mesh dimension {} (size {}). Please redistribute the tensor before this operation.",
          describe_(), fmt::join(to_, ", "), now_[m].dim, from_[now_[m].dim], m, mesh_.shape()[m]);
  }

  [[noreturn]] void fail_unflatten(int64_t m, int64_t dim) const {
    raise(ErrorKind::kShape,
          "Sharding dimension mismatch: [dtensor.dispatch] {} to [{}]: Cannot unflatten unevenly sharded tensor: "
          "output dimension {} (size {}) is not "
          "evenly divisible by mesh dimension {} (size {}). Please redistribute the tensor before this operation.",
          describe_(), fmt::join(to_, ", "), dim, to_[dim], m, mesh_.shape()[m]);
  }

  const DeviceMesh& mesh_;
  c10::IntArrayRef from_;
  c10::IntArrayRef to_;
  const Placements& now_;
  ViewMap map_;
  Describe describe_;
};

// Returns placements for which the view is possible: replaces shards of the input by Replicate, from the last mesh dim
// to the first, until ViewPlacements raises no error.
PlacementChoice gathered_view(const OpCall& call, c10::IntArrayRef sizes) {
  Placements now = call.inputs[0].placements;
  for (;;) {
    try {
      return {{now}, {ViewPlacements(call, sizes, now).result()}};
    } catch (const Error&) {
      const auto last = std::find_if(now.rbegin(), now.rend(), [](const Placement& p) { return p.is_any_shard(); });
      if (last == now.rend()) throw;
      *last = Replicate();
    }
  }
}

// view(self, size). If the view is not possible with the placements of self, `may_gather` decides: true: self is
// gathered and the result is a view of the copy; false: Error kShape.
void propose_view(const OpCall& call, Proposal& proposal, bool may_gather) {
  const TensorInput& self = call.inputs[0];
  const auto sizes = at::infer_size(call.ints_at(1), c10::multiply_integers(self.sizes));
  OutputShape shape{sizes, {}};
  if (!self.tensor->is_contiguous()) {
    const auto strides = at::detail::computeStride(self.sizes, self.tensor->strides(), sizes);
    TESSERA_CHECK(strides.has_value(), ErrorKind::kShape,
                  "[dtensor.dispatch] {}: strides [{}] cannot be viewed as [{}]. Use reshape.", call.describe(),
                  fmt::join(self.tensor->strides(), ", "), fmt::join(sizes, ", "));
    shape.strides = *strides;
  }
  proposal.choice = may_gather
                        ? gathered_view(call, sizes)
                        : PlacementChoice{{self.placements}, {ViewPlacements(call, sizes, self.placements).result()}};
  if (proposal.choice->inputs[0] != self.placements) shape.strides.clear();
  proposal.outputs.push_back(std::move(shape));
  proposal.rewrite = with_local_sizes(1);
}

// view(self, size): the result must share the memory of self, so self is not gathered. There are two exceptions: a
// backward, because derivative formulas may flatten unevenly sharded dims, and composite operations that return new
// tensors. There the result may be a view of a gathered copy; writing to it raises an error.
void propose_strict_view(const OpCall& call, Proposal& proposal) {
  propose_view(call, proposal, in_backward() || AllowGatheringViews::in_force());
  proposal.cacheable = proposal.choice->inputs[0] == call.inputs[0].placements;
}

// view_copy(self, size): the result is a new tensor, so dims of self whose shards prevent the view are gathered.
void propose_view_copy(const OpCall& call, Proposal& proposal) {
  const auto sizes = at::infer_size(call.ints_at(1), c10::multiply_integers(call.inputs[0].sizes));
  proposal.choice = gathered_view(call, sizes);
  proposal.outputs.push_back({sizes, {}});
  proposal.rewrite = with_local_sizes(1);
}

// _unsafe_view(self, size): the input is a temporary copy, so it may be copied again if its strides do not fit.
void propose_unsafe_view(const OpCall& call, Proposal& proposal) {
  const at::Tensor& self = *call.inputs[0].tensor;
  const auto sizes = at::infer_size(call.ints_at(1), self.numel());
  if (self.is_contiguous() || at::detail::computeStride(self.sizes(), self.strides(), sizes)) {
    propose_view(call, proposal, /*may_gather=*/true);
    return;
  }
  propose_view_copy(call, proposal);
  proposal.local = [](const OpCall&, const PlacementChoice&) {
    return [](const LocalCall& local) { local.finish({local.arg(0).toTensor().reshape(local.arg(1).toIntVector())}); };
  };
}

// _reshape_alias(self, size, stride): a view that reshape and flatten call. `stride` has the global strides that they
// have computed.
void propose_reshape_alias(const OpCall& call, Proposal& proposal) {
  propose_view(call, proposal, /*may_gather=*/true);
  proposal.local = [](const OpCall&, const PlacementChoice&) {
    return [](const LocalCall& local) {
      const at::Tensor part = local.arg(0).toTensor();
      const auto sizes = local.arg(1).toIntVector();
      const auto strides = at::detail::computeStride(part.sizes(), part.strides(), sizes);
      // A local tensor that the user passed to from_local may have a memory order that does not allow this view
      // although the global strides do. It is then copied.
      local.finish({strides ? at::_reshape_alias(part, sizes, *strides) : part.reshape(sizes)});
    };
  };
}

}  // namespace

bool can_view(const DeviceMesh& mesh, c10::IntArrayRef from, const Placements& placements, c10::IntArrayRef to) {
  try {
    ViewPlacements(mesh, from, to, placements, [] { return std::string("view"); }).result();
    return true;
  } catch (const Error&) {
    return false;
  }
}

void add_view_rules(RuleTable& table) {
  table.add("aten::view", propose_strict_view);
  table.add("aten::_unsafe_view", propose_unsafe_view);
  table.add("aten::view_copy", propose_view_copy);
  table.add({"aten::_reshape_alias", "aten::_reshape_alias_copy"}, propose_reshape_alias);
}

}  // namespace tessera
