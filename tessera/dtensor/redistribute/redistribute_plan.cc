// The planner: finds the steps from one list of placements to another. It tracks the cuts reached so far.
#include <algorithm>
#include <iterator>

#include "tessera/base/error.h"
#include "tessera/dtensor/redistribute/redistribute.h"

namespace tessera {

namespace {

using Kind = Step::Kind;

Cuts of_dim(const Cuts& cuts, int64_t dim) {
  Cuts found;
  std::copy_if(cuts.begin(), cuts.end(), std::back_inserter(found), [dim](const Cut& c) { return c.dim == dim; });
  return found;
}

// Mesh dims whose cuts of tensor dim `dim` are outside the cut of mesh dim m. If m does not cut `dim`, these are the
// mesh dims before m that do.
MeshDims holders(const Cuts& cuts, int64_t dim, int64_t m) {
  MeshDims outside;
  MeshDims earlier;
  for (const Cut& cut : of_dim(cuts, dim)) {
    if (cut.mesh_dim == m) return outside;
    outside.push_back(cut.mesh_dim);
    if (cut.mesh_dim < m) earlier.push_back(cut.mesh_dim);
  }
  return earlier;
}

// Placements in which shards that are nested last are written as ordinary shards; their position is in the list of
// cuts.
Placements with_plain_nested(const DeviceMesh& mesh, const Placements& placements) {
  Placements plain = placements;
  for (size_t i = 0; i < placements.size(); ++i) {
    plain[i] = is_nested_last(mesh, placements, i) ? Shard(placements[i].dim) : placements[i];
  }
  return plain;
}

// Invariant: `now_` are the placements reached by `steps_`, and `cuts_` are the cuts of these placements, outermost
// first. Each call of add() appends a step and sets `cuts_`. A plan is complete when `now_` equals `to_` and `cuts_`
// equals `goal_`.
class Planner {
 public:
  Planner(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from, const Placements& to)
      : sizes_(global_sizes.begin(), global_sizes.end()),
        mesh_(mesh),
        now_(with_plain_nested(mesh, from)),
        to_(with_plain_nested(mesh, to)),
        cuts_(cuts_of(mesh, from)),
        goal_(cuts_of(mesh, to)) {}

  // Changes one mesh dim after another, as PyTorch does.
  Steps one_by_one() {
    for (int64_t m = mesh_.ndim(); m-- > 0;) undo_if_misplaced(m);
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      if (!done(m) && now_[m].is_partial() && to_[m].is_partial(ReduceOp::kProduct)) change(m, Replicate());
    }
    // Goes from the first mesh dim to the last, but makes a shard only after the shards that must be outside of it. If
    // no mesh dim is ready, shards wait for one another; then one of them is gathered.
    for (bool progress = true; progress;) {
      progress = false;
      for (int64_t m = 0; m < mesh_.ndim(); ++m) {
        if (!done(m) && ready(m)) {
          change(m, to_[m]);
          progress = true;
        }
      }
      for (int64_t m = mesh_.ndim(); m-- > 0 && !progress;) {
        if (!done(m) && now_[m].is_any_shard()) {
          undo(m);
          progress = true;
        }
      }
    }
    return std::move(steps_);
  }

  bool possible_at_once() const {
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      if (!done(m) && (to_[m].is_partial() || now_[m].kind == Placement::Kind::kNormPartial)) return false;
    }
    return true;
  }

  // Reduces partial values, then changes all cuts that differ. With cut_first, mesh dims that are Replicate now and
  // become shards are cut before the reductions, which then communicate less.
  Steps at_once(bool cut_first) {
    if (cut_first) {
      Cuts cut = cuts_;
      for (const Cut& c : goal_) {
        if (now_[c.mesh_dim].is_replicate()) cut.push_back(c);
      }
      add(Kind::kCut, {}, cut);
    }
    reduce_partials(/*scatter=*/true);
    reduce_partials(/*scatter=*/false);
    move();
    return std::move(steps_);
  }

 private:
  bool done(int64_t m) const { return now_[m] == to_[m]; }

  bool all_done(const MeshDims& dims) const {
    return std::ranges::all_of(dims, [&](int64_t i) { return done(i); });
  }

  // Whether mesh dim m may get its final placement. For a shard, all shards outside of it must be final, and no other
  // shard may cut the dim, since it would be outside, too. For a partial product no other mesh dim may still have to be
  // reduced, because a sum over that mesh dim would add up the neutral ones of the product.
  bool ready(int64_t m) const {
    if (to_[m].is_partial(ReduceOp::kProduct)) {
      for (int64_t other = 0; other < mesh_.ndim(); ++other) {
        if (other != m && !done(other) && now_[other].is_partial()) return false;
      }
    }
    if (!to_[m].is_any_shard()) return true;
    const MeshDims outside = holders(goal_, to_[m].dim, m);
    const Cuts present = of_dim(cuts_, to_[m].dim);
    return all_done(outside) && std::ranges::all_of(present, [&](const Cut& cut) {
             return cut.mesh_dim == m || std::ranges::find(outside, cut.mesh_dim) != outside.end();
           });
  }

  // The cuts without those of mesh dims of one rank, which divide nothing.
  Cuts real(const Cuts& cuts) const {
    Cuts kept;
    std::copy_if(cuts.begin(), cuts.end(), std::back_inserter(kept),
                 [&](const Cut& cut) { return mesh_.shape()[cut.mesh_dim] > 1; });
    return kept;
  }

  // Appends a step, unless it would change nothing. Mesh dims of one rank are left out.
  void add(Kind kind, MeshDims dims, const Cuts& to, const Placement& partial = Replicate()) {
    dims.erase(std::remove_if(dims.begin(), dims.end(), [&](int64_t dim) { return mesh_.shape()[dim] == 1; }),
               dims.end());
    const Cuts from = real(cuts_);
    cuts_ = to;
    const bool moves = kind == Kind::kCut ? real(to) != from : !dims.empty();
    if (moves) steps_.push_back({kind, std::move(dims), from, real(to), sizes_, partial});
  }

  // ---- one by one ----

  // Gathers a strided shard that has to change, and a shard that has other shards outside of it now than in the goal.
  // Shards inside it are gathered first.
  void undo_if_misplaced(int64_t m) {
    if (!now_[m].is_any_shard()) return;
    const int64_t dim = now_[m].dim;
    const bool strided = now_[m].is_strided_shard() && !done(m);
    const MeshDims outside = holders(cuts_, dim, m);
    if (!strided && outside == holders(goal_, dim, m) && all_done(outside)) return;
    undo(m);
  }

  // Gathers a shard, and before it the shards inside it.
  void undo(int64_t m) {
    const int64_t dim = now_[m].dim;
    const size_t outside = holders(cuts_, dim, m).size();
    const Cuts nested = of_dim(cuts_, dim);
    for (size_t i = nested.size(); i-- > outside;) change(nested[i].mesh_dim, Replicate());
  }

  // Appends the step that changes one mesh dim from its placement to `target`.
  void change(int64_t m, const Placement& target) {
    const Placement source = now_[m];
    if (source == target) return;
    // Some changes need an intermediate Replicate: from a shard or another Partial to Partial, and from or to a strided
    // shard.
    const bool strided = source.is_strided_shard() || target.is_strided_shard();
    if (!source.is_replicate() && !target.is_replicate() && (strided || target.is_partial())) {
      change(m, Replicate());
      change(m, target);
      return;
    }
    Cuts cuts = cuts_;
    cuts.erase(std::remove_if(cuts.begin(), cuts.end(), [m](const Cut& cut) { return cut.mesh_dim == m; }), cuts.end());
    if (target.is_any_shard()) cuts.push_back({m, target.dim, target.is_strided_shard() ? target.split_factor : 1});
    now_[m] = target;
    if (source.is_partial()) {
      add(target.is_any_shard() ? Kind::kReduceScatter : Kind::kReduce, {m}, cuts, source);
    } else if (source.is_any_shard()) {
      add(target.is_any_shard() ? Kind::kExchange : Kind::kGather, {m}, cuts);
    } else {
      add(target.is_partial() ? Kind::kSpread : Kind::kCut, {m}, cuts, target.is_partial() ? target : Replicate());
    }
  }

  // ---- at once ----

  // Appends one step for each kind of reduction.
  void reduce_partials(bool scatter) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      MeshDims dims;
      Cuts cuts = cuts_;
      for (int64_t m = 0; m < mesh_.ndim(); ++m) {
        if (now_[m].is_partial(op) && !done(m) && to_[m].is_any_shard() == scatter) dims.push_back(m);
      }
      for (const Cut& c : goal_) {
        if (scatter && std::ranges::find(dims, c.mesh_dim) != dims.end()) cuts.push_back(c);
      }
      if (!dims.empty()) add(scatter ? Kind::kReduceScatter : Kind::kReduce, dims, cuts, Partial(op));
    }
  }

  // Appends one step from the present cuts to the goal. For each tensor dim the cuts that both lists begin with stay.
  // If the other cuts are only removed, the step is an all-gather; if they are only added, it is local; else it is an
  // all-to-all.
  void move() {
    MeshDims dims;
    bool undone = false;  // some cut is removed
    bool made = false;    // some cut is added
    const Cuts from = real(cuts_);
    const Cuts to = real(goal_);
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes_.size()); ++dim) {
      const Cuts now = of_dim(from, dim);
      const Cuts goal = of_dim(to, dim);
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
    if (undone || made) add(!undone ? Kind::kCut : made ? Kind::kExchange : Kind::kGather, dims, goal_);
  }

  Sizes sizes_;
  const DeviceMesh& mesh_;
  Placements now_;  // with shards that are nested last written as plain shards
  Placements to_;
  Cuts cuts_;
  Cuts goal_;
  Steps steps_;
};

}  // namespace

std::shared_ptr<const Movement> work_out(const Step& step, const DeviceMesh& mesh) {
  if (step.kind == Kind::kReduce || step.kind == Kind::kSpread) {
    return nullptr;  // every rank keeps all its elements
  }
  const bool exchanges = step.kind == Kind::kExchange;
  return std::make_shared<Movement>(movement_of({step.global_sizes, step.mesh_dims, step.from, step.to,
                                                 /*before=*/exchanges || step.kind == Kind::kGather,
                                                 /*after=*/exchanges || step.kind == Kind::kReduceScatter},
                                                mesh));
}

Steps plan_one_by_one(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                      const Placements& to) {
  return from == to ? Steps{} : Planner(global_sizes, mesh, from, to).one_by_one();
}

// Both variants are planned and the cheaper one is returned. Cutting early reduces the reduced data, but may need
// another step.
std::optional<Steps> plan_at_once(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                                  const Placements& to) {
  const Planner planner(global_sizes, mesh, from, to);
  if (!planner.possible_at_once()) return std::nullopt;
  Steps cut_late = Planner(planner).at_once(false);
  Steps cut_early = Planner(planner).at_once(true);
  return cost_of(cut_early, 4, mesh) < cost_of(cut_late, 4, mesh) ? cut_early : cut_late;
}

Steps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                        const Placements& to) {
  if (!mesh.coordinate()) return {};
  Steps steps = plan_one_by_one(global_sizes, mesh, from, to);
  if (steps.size() > 1 && std::ranges::any_of(steps, communicates)) {
    constexpr int64_t kItemBytes = 4;  // one item size for all dtypes: plans must depend on shapes and placements only
    auto at_once = plan_at_once(global_sizes, mesh, from, to);
    if (at_once && cost_of(*at_once, kItemBytes, mesh) < cost_of(steps, kItemBytes, mesh)) steps = *std::move(at_once);
  }
  for (Step& step : steps) step.movement = work_out(step, mesh);
  return steps;
}

}  // namespace tessera
