// The planner: which steps lead from one list of placements to another. It keeps the cuts reached so far.
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

// The mesh dims whose cuts of `dim` hold that of mesh dim m: those outside it. For an m that does not cut it, the
// earlier mesh dims.
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

Placements with_plain_nested(const DeviceMesh& mesh, const Placements& placements) {
  Placements plain = placements;
  for (size_t i = 0; i < placements.size(); ++i) {
    plain[i] = is_nested_last(mesh, placements, i) ? Shard(placements[i].dim) : placements[i];
  }
  return plain;
}

class Planner {
 public:
  Planner(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from, const Placements& to)
      : sizes_(global_sizes.begin(), global_sizes.end()),
        mesh_(mesh),
        now_(with_plain_nested(mesh, from)),
        to_(with_plain_nested(mesh, to)),
        cuts_(cuts_of(mesh, from)),
        goal_(cuts_of(mesh, to)) {}

  // One mesh dim after another, as upstream.
  Steps one_by_one() {
    for (int64_t m = mesh_.ndim(); m-- > 0;) undo_if_misplaced(m);
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      if (!done(m) && now_[m].is_partial() && to_[m].is_partial(ReduceOp::kProduct)) change(m, Replicate());
    }
    // First to last, but a shard comes after the shards that hold it. One that others wait for while it waits itself is
    // taken back.
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

  // Reductions, then all cuts that differ. cut_first: what will be cut anyway is cut before the reductions, which then
  // have less to move.
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

  // Whether a shard's holders are there and nothing else cuts its dim, which would hold it, too; whether nothing is
  // left to reduce that would add up the ones that fill up a product.
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

  // Mesh dims of one rank cut nothing.
  Cuts real(const Cuts& cuts) const {
    Cuts kept;
    std::copy_if(cuts.begin(), cuts.end(), std::back_inserter(kept),
                 [&](const Cut& cut) { return mesh_.shape()[cut.mesh_dim] > 1; });
    return kept;
  }

  void add(Kind kind, MeshDims dims, const Cuts& to, const Placement& partial = Replicate()) {
    dims.erase(std::remove_if(dims.begin(), dims.end(), [&](int64_t dim) { return mesh_.shape()[dim] == 1; }),
               dims.end());
    const Cuts from = real(cuts_);
    cuts_ = to;
    const bool moves = kind == Kind::kCut ? real(to) != from : !dims.empty();
    if (moves) steps_.push_back({kind, std::move(dims), from, real(to), sizes_, partial});
  }

  // ---- one by one ----

  // Gathers a shard that would not stay inside the same others, and before it those inside it.
  void undo_if_misplaced(int64_t m) {
    if (!now_[m].is_any_shard()) return;
    const int64_t dim = now_[m].dim;
    const bool strided = now_[m].is_strided_shard() && !done(m);
    const MeshDims outside = holders(cuts_, dim, m);
    if (!strided && outside == holders(goal_, dim, m) && all_done(outside)) return;
    undo(m);
  }

  // Gathers a shard, and before it those inside it.
  void undo(int64_t m) {
    const int64_t dim = now_[m].dim;
    const size_t outside = holders(cuts_, dim, m).size();
    const Cuts nested = of_dim(cuts_, dim);
    for (size_t i = nested.size(); i-- > outside;) change(nested[i].mesh_dim, Replicate());
  }

  void change(int64_t m, const Placement& target) {
    const Placement source = now_[m];
    if (source == target) return;
    // A shard becomes partial, and a strided shard anything, by way of the whole.
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

  // One step for each reduction.
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

  // From the cuts so far to the goal, in one step over the mesh dims whose cuts differ.
  void move() {
    MeshDims dims;
    bool undone = false;  // some cut is taken back
    bool made = false;    // some cut is new
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
    return nullptr;  // whole parts stay where they are
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
    constexpr int64_t kItemBytes = 4;  // plans must not depend on more than shapes and placements
    auto at_once = plan_at_once(global_sizes, mesh, from, to);
    if (at_once && cost_of(*at_once, kItemBytes, mesh) < cost_of(steps, kItemBytes, mesh)) steps = *std::move(at_once);
  }
  for (Step& step : steps) step.movement = work_out(step, mesh);
  return steps;
}

}  // namespace tessera
