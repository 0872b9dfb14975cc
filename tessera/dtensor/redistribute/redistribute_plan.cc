// Plans a redistribution: finds the steps that change one list of placements to another.
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

// Returns the mesh dims whose splits of tensor dim `dim` come before (outside) the split on mesh dim m. If mesh dim m
// does not split `dim`, returns the mesh dims before m that split `dim`.
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

// Returns the placements with each StridedShard for which is_inside_later_shards() is true replaced by a Shard. The
// order of the shards is then only in the list of splits.
Placements with_plain_shards(const DeviceMesh& mesh, const Placements& placements) {
  Placements plain = placements;
  for (size_t i = 0; i < placements.size(); ++i) {
    plain[i] = is_inside_later_shards(mesh, placements, i) ? Shard(placements[i].dim) : placements[i];
  }
  return plain;
}

// Builds the list `steps_`. `now_` are the placements after these steps, and `splits_` are the splits of these
// placements, outermost first. append_step() appends a step and updates `splits_`. A plan is complete when `now_`
// equals `to_` and `splits_` equals `goal_`.
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

  // Returns the greedy plan, which changes one mesh dim after another, as PyTorch does.
  RedistributeSteps plan_greedy() {
    for (int64_t m = mesh_.ndim(); m-- > 0;) gather_misplaced_shard(m);
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      if (!is_final(m) && now_[m].is_partial() && to_[m].is_partial(ReduceOp::kProduct)) {
        change_placement(m, Replicate());
      }
    }
    // Each pass of the loop gives mesh dims their final placements `to_`, from the first mesh dim to the last. It
    // leaves out a mesh dim for which can_be_final() is false, such as one whose shard must be inside of a shard that
    // is not final yet. If a pass changes no mesh dim, the shards block one another; then gather_shard() gathers one of
    // them.
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

  // Plans the reductions of Partial mesh dims, then one step that changes all splits. With slice_first, the mesh dims
  // that change from Replicate to a shard are sliced before the reductions, which then communicate less.
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

  // Whether mesh dim m may get its final placement to_[m] now. If this is a shard, all shards that must be outside of
  // it must be final. No other shard may split the same tensor dim now, because the new shard would be inside of it. If
  // to_[m] is Partial(product), no other mesh dim may still need a reduction: Partial(product) fills ranks with ones,
  // and a later sum over another mesh dim would add these ones.
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

  // Returns the splits without those on mesh dims of size 1, which do not divide the tensor.
  ShardSplits without_single_rank_dims(const ShardSplits& splits) const {
    ShardSplits kept;
    std::copy_if(splits.begin(), splits.end(), std::back_inserter(kept),
                 [&](const ShardSplit& split) { return mesh_.shape()[split.mesh_dim] > 1; });
    return kept;
  }

  // Sets `splits_` to `to` and appends the step that reaches these splits, unless it changes no rank's data. The step
  // leaves out mesh dims of size 1.
  void append_step(Kind kind, MeshDims dims, const ShardSplits& to, const Placement& partial = Replicate()) {
    dims.erase(std::remove_if(dims.begin(), dims.end(), [&](int64_t dim) { return mesh_.shape()[dim] == 1; }),
               dims.end());
    const ShardSplits from = without_single_rank_dims(splits_);
    splits_ = to;
    const bool moves = kind == Kind::kSliceLocal ? without_single_rank_dims(to) != from : !dims.empty();
    if (moves) steps_.push_back({kind, std::move(dims), from, without_single_rank_dims(to), sizes_, partial});
  }

  // ---- steps of the greedy plan ----

  // Gathers the shard on mesh dim m in two cases: it is a StridedShard that must change, or the shards outside of it
  // (outer_mesh_dims()) are not yet the ones that the target placements `to_` have outside of it. gather_shard() first
  // gathers the shards that are inside of this shard.
  void gather_misplaced_shard(int64_t m) {
    if (!now_[m].is_any_shard()) return;
    const int64_t dim = now_[m].dim;
    const bool strided = now_[m].is_strided_shard() && !is_final(m);
    const MeshDims outside = outer_mesh_dims(splits_, dim, m);
    if (!strided && outside == outer_mesh_dims(goal_, dim, m) && are_final(outside)) return;
    gather_shard(m);
  }

  // Gathers the shards of mesh dim m, so that m becomes Replicate. Other mesh dims may split the same tensor dim inside
  // of the split on m, which means that they divide its chunks. These mesh dims are gathered first, from the innermost
  // one outwards.
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
    // Some changes go through Replicate: from a shard or another Partial to Partial, and from or to a StridedShard.
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

  // ---- steps over several mesh dims ----

  // For each reduction (sum, average, ...), appends one step for all mesh dims that are Partial with this reduction and
  // are treated by this call. With `scatter` these are the mesh dims that become shards, and the step is a
  // reduce-scatter. Without `scatter` they are all other mesh dims, and the step is an all-reduce.
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

  // Appends one step that changes `splits_` to `goal_`. For each tensor dim the splits at the beginning that both lists
  // have in common stay. If the remaining splits are only removed, the step is an all-gather; if they are only added,
  // it is a local slice; else it is an all-to-all.
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
  Placements now_;  // as with_plain_shards() returns them
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

// Returns the cheaper of two plans, with and without slice_first. Slicing first makes the reductions smaller but may
// need one more step.
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
