// The planner: finds the steps from one list of placements to another. It tracks the splits reached so far.
#include <algorithm>
#include <iterator>

#include "tessera/base/error.h"
#include "tessera/dtensor/redistribute/redistribute.h"

namespace tessera {

namespace {

using Kind = RedistributeStep::Kind;

ShardSplits splits_of_dim(const ShardSplits& splits, int64_t dim) {
  ShardSplits found;
  std::copy_if(splits.begin(), splits.end(), std::back_inserter(found),
               [dim](const ShardSplit& c) { return c.dim == dim; });
  return found;
}

// Mesh dims whose splits of tensor dim `dim` are outside the split of mesh dim m. If m does not split `dim`, these are
// the mesh dims before m that do.
MeshDims outer_mesh_dims(const ShardSplits& splits, int64_t dim, int64_t m) {
  MeshDims outside;
  MeshDims earlier;
  for (const ShardSplit& split : splits_of_dim(splits, dim)) {
    if (split.mesh_dim == m) return outside;
    outside.push_back(split.mesh_dim);
    if (split.mesh_dim < m) earlier.push_back(split.mesh_dim);
  }
  return earlier;
}

// Placements in which shards inside later shards are written as ordinary shards; their position is in the list of
// splits.
Placements with_plain_shards(const DeviceMesh& mesh, const Placements& placements) {
  Placements plain = placements;
  for (size_t i = 0; i < placements.size(); ++i) {
    plain[i] = is_inside_later_shards(mesh, placements, i) ? Shard(placements[i].dim) : placements[i];
  }
  return plain;
}

// Invariant: `now_` are the placements reached by `steps_`, and `splits_` are the splits of these placements, outermost
// first. Each call of append_step() appends a step and sets `splits_`. A plan is complete when `now_` equals `to_` and
// `splits_` equals `goal_`.
class RedistributePlanner {
 public:
  RedistributePlanner(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                      const Placements& to)
      : sizes_(global_sizes.begin(), global_sizes.end()),
        mesh_(mesh),
        now_(with_plain_shards(mesh, from)),
        to_(with_plain_shards(mesh, to)),
        splits_(shard_splits_of(mesh, from)),
        goal_(shard_splits_of(mesh, to)) {}

  // Changes one mesh dim after another, as PyTorch does.
  RedistributeSteps plan_greedy() {
    for (int64_t m = mesh_.ndim(); m-- > 0;) gather_misplaced_shard(m);
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      if (!is_final(m) && now_[m].is_partial() && to_[m].is_partial(ReduceOp::kProduct)) {
        change_placement(m, Replicate());
      }
    }
    // Goes from the first mesh dim to the last, but makes a shard only after the shards that must be outside of it. If
    // no mesh dim is ready, shards wait for one another; then one of them is gathered.
    for (bool progress = true; progress;) {
      progress = false;
      for (int64_t m = 0; m < mesh_.ndim(); ++m) {
        if (!is_final(m) && can_be_final(m)) {
          change_placement(m, to_[m]);
          progress = true;
        }
      }
      for (int64_t m = mesh_.ndim(); m-- > 0 && !progress;) {
        if (!is_final(m) && now_[m].is_any_shard()) {
          gather_shard(m);
          progress = true;
        }
      }
    }
    return std::move(steps_);
  }

  bool can_plan_multi_dim() const {
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      if (!is_final(m) && (to_[m].is_partial() || now_[m].kind == Placement::Kind::kNormPartial)) return false;
    }
    return true;
  }

  // Reduces partial values, then changes all splits that differ. With slice_first, mesh dims that are Replicate now and
  // become shards are sliced before the reductions, which then communicate less.
  RedistributeSteps plan_multi_dim(bool slice_first) {
    if (slice_first) {
      ShardSplits sliced = splits_;
      for (const ShardSplit& c : goal_) {
        if (now_[c.mesh_dim].is_replicate()) sliced.push_back(c);
      }
      append_step(Kind::kSliceLocal, {}, sliced);
    }
    reduce_partials(/*scatter=*/true);
    reduce_partials(/*scatter=*/false);
    append_split_change();
    return std::move(steps_);
  }

 private:
  bool is_final(int64_t m) const { return now_[m] == to_[m]; }

  bool are_final(const MeshDims& dims) const {
    return std::ranges::all_of(dims, [&](int64_t i) { return is_final(i); });
  }

  // Whether mesh dim m may get its final placement. For a shard, all shards outside of it must be final, and no other
  // shard may split the dim, since it would be outside, too. For a partial product no other mesh dim may still have to
  // be reduced, because a sum over that mesh dim would add up the neutral ones of the product.
  bool can_be_final(int64_t m) const {
    if (to_[m].is_partial(ReduceOp::kProduct)) {
      for (int64_t other = 0; other < mesh_.ndim(); ++other) {
        if (other != m && !is_final(other) && now_[other].is_partial()) return false;
      }
    }
    if (!to_[m].is_any_shard()) return true;
    const MeshDims outside = outer_mesh_dims(goal_, to_[m].dim, m);
    const ShardSplits present = splits_of_dim(splits_, to_[m].dim);
    return are_final(outside) && std::ranges::all_of(present, [&](const ShardSplit& split) {
             return split.mesh_dim == m || std::ranges::find(outside, split.mesh_dim) != outside.end();
           });
  }

  // The splits without those of mesh dims of one rank, which divide nothing.
  ShardSplits without_single_rank_dims(const ShardSplits& splits) const {
    ShardSplits kept;
    std::copy_if(splits.begin(), splits.end(), std::back_inserter(kept),
                 [&](const ShardSplit& split) { return mesh_.shape()[split.mesh_dim] > 1; });
    return kept;
  }

  // Appends a step, unless it would change nothing. Mesh dims of one rank are left out.
  void append_step(Kind kind, MeshDims dims, const ShardSplits& to, const Placement& partial = Replicate()) {
    dims.erase(std::remove_if(dims.begin(), dims.end(), [&](int64_t dim) { return mesh_.shape()[dim] == 1; }),
               dims.end());
    const ShardSplits from = without_single_rank_dims(splits_);
    splits_ = to;
    const bool moves = kind == Kind::kSliceLocal ? without_single_rank_dims(to) != from : !dims.empty();
    if (moves) steps_.push_back({kind, std::move(dims), from, without_single_rank_dims(to), sizes_, partial});
  }

  // ---- greedy ----

  // Gathers a strided shard that has to change, and a shard that has other shards outside of it now than in the goal.
  // Shards inside it are gathered first.
  void gather_misplaced_shard(int64_t m) {
    if (!now_[m].is_any_shard()) return;
    const int64_t dim = now_[m].dim;
    const bool strided = now_[m].is_strided_shard() && !is_final(m);
    const MeshDims outside = outer_mesh_dims(splits_, dim, m);
    if (!strided && outside == outer_mesh_dims(goal_, dim, m) && are_final(outside)) return;
    gather_shard(m);
  }

  // Gathers a shard, and before it the shards inside it.
  void gather_shard(int64_t m) {
    const int64_t dim = now_[m].dim;
    const size_t outside = outer_mesh_dims(splits_, dim, m).size();
    const ShardSplits nested = splits_of_dim(splits_, dim);
    for (size_t i = nested.size(); i-- > outside;) change_placement(nested[i].mesh_dim, Replicate());
  }

  // Appends the step that changes one mesh dim from its placement to `target`.
  void change_placement(int64_t m, const Placement& target) {
    const Placement source = now_[m];
    if (source == target) return;
    // Some changes need an intermediate Replicate: from a shard or another Partial to Partial, and from or to a strided
    // shard.
    const bool strided = source.is_strided_shard() || target.is_strided_shard();
    if (!source.is_replicate() && !target.is_replicate() && (strided || target.is_partial())) {
      change_placement(m, Replicate());
      change_placement(m, target);
      return;
    }
    ShardSplits splits = splits_;
    splits.erase(
        std::remove_if(splits.begin(), splits.end(), [m](const ShardSplit& split) { return split.mesh_dim == m; }),
        splits.end());
    if (target.is_any_shard()) splits.push_back({m, target.dim, target.is_strided_shard() ? target.split_factor : 1});
    now_[m] = target;
    if (source.is_partial()) {
      append_step(target.is_any_shard() ? Kind::kReduceScatter : Kind::kAllReduce, {m}, splits, source);
    } else if (source.is_any_shard()) {
      append_step(target.is_any_shard() ? Kind::kAllToAll : Kind::kAllGather, {m}, splits);
    } else {
      append_step(target.is_partial() ? Kind::kReplicateToPartial : Kind::kSliceLocal, {m}, splits,
                  target.is_partial() ? target : Replicate());
    }
  }

  // ---- several mesh dims at once ----

  // Appends one step for each kind of reduction.
  void reduce_partials(bool scatter) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      MeshDims dims;
      ShardSplits splits = splits_;
      for (int64_t m = 0; m < mesh_.ndim(); ++m) {
        if (now_[m].is_partial(op) && !is_final(m) && to_[m].is_any_shard() == scatter) dims.push_back(m);
      }
      for (const ShardSplit& c : goal_) {
        if (scatter && std::ranges::find(dims, c.mesh_dim) != dims.end()) splits.push_back(c);
      }
      if (!dims.empty()) append_step(scatter ? Kind::kReduceScatter : Kind::kAllReduce, dims, splits, Partial(op));
    }
  }

  // Appends one step from the present splits to the goal. For each tensor dim the splits that both lists begin with
  // stay. If the other splits are only removed, the step is an all-gather; if they are only added, it is local; else it
  // is an all-to-all.
  void append_split_change() {
    MeshDims dims;
    bool undone = false;  // some split is removed
    bool made = false;    // some split is added
    const ShardSplits from = without_single_rank_dims(splits_);
    const ShardSplits to = without_single_rank_dims(goal_);
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes_.size()); ++dim) {
      const ShardSplits now = splits_of_dim(from, dim);
      const ShardSplits goal = splits_of_dim(to, dim);
      const auto same = static_cast<size_t>(
          std::mismatch(now.begin(), now.begin() + std::min(now.size(), goal.size()), goal.begin()).first -
          now.begin());
      undone = undone || same < now.size();
      made = made || same < goal.size();
      for (const auto* list : {&now, &goal}) {
        for (size_t i = same; i < list->size(); ++i) dims.push_back((*list)[i].mesh_dim);
      }
    }
    std::ranges::sort(dims);
    dims.erase(std::unique(dims.begin(), dims.end()), dims.end());
    if (undone || made) {
      append_step(!undone ? Kind::kSliceLocal : made ? Kind::kAllToAll : Kind::kAllGather, dims, goal_);
    }
  }

  Sizes sizes_;
  const DeviceMesh& mesh_;
  Placements now_;  // with shards inside later shards written as plain shards
  Placements to_;
  ShardSplits splits_;
  ShardSplits goal_;
  RedistributeSteps steps_;
};

}  // namespace

std::shared_ptr<const TransferPlan> plan_transfer(const RedistributeStep& step, const DeviceMesh& mesh) {
  if (step.kind == Kind::kAllReduce || step.kind == Kind::kReplicateToPartial) {
    return nullptr;  // every rank keeps all its elements
  }
  const bool exchanges = step.kind == Kind::kAllToAll;
  return std::make_shared<TransferPlan>(
      compute_transfer({step.global_sizes, step.mesh_dims, step.from, step.to,
                        /*needs_parts_before=*/exchanges || step.kind == Kind::kAllGather,
                        /*needs_parts_after=*/exchanges || step.kind == Kind::kReduceScatter},
                       mesh));
}

RedistributeSteps plan_greedy(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                              const Placements& to) {
  return from == to ? RedistributeSteps{} : RedistributePlanner(global_sizes, mesh, from, to).plan_greedy();
}

// Both variants are planned and the cheaper one is returned. Slicing early reduces the reduced data, but may need
// another step.
std::optional<RedistributeSteps> plan_multi_dim(c10::IntArrayRef global_sizes, const DeviceMesh& mesh,
                                                const Placements& from, const Placements& to) {
  const RedistributePlanner planner(global_sizes, mesh, from, to);
  if (!planner.can_plan_multi_dim()) return std::nullopt;
  RedistributeSteps slice_late = RedistributePlanner(planner).plan_multi_dim(false);
  RedistributeSteps slice_early = RedistributePlanner(planner).plan_multi_dim(true);
  return cost_of(slice_early, 4, mesh) < cost_of(slice_late, 4, mesh) ? slice_early : slice_late;
}

RedistributeSteps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                                    const Placements& to) {
  if (!mesh.coordinate()) return {};
  RedistributeSteps steps = plan_greedy(global_sizes, mesh, from, to);
  if (steps.size() > 1 && std::ranges::any_of(steps, communicates)) {
    constexpr int64_t kItemBytes = 4;  // one item size for all dtypes: plans must depend on shapes and placements only
    auto multi_dim = plan_multi_dim(global_sizes, mesh, from, to);
    if (multi_dim && cost_of(*multi_dim, kItemBytes, mesh) < cost_of(steps, kItemBytes, mesh)) {
      steps = *std::move(multi_dim);
    }
  }
  for (RedistributeStep& step : steps) step.transfer = plan_transfer(step, mesh);
  return steps;
}

}  // namespace tessera
