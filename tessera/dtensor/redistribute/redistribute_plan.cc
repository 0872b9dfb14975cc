#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/redistribute/redistribute.h"

namespace tessera::detail {

namespace {

using MeshDims = c10::SmallVector<int64_t, 4>;

// The mesh dims that shard tensor dim `dim`, outermost first.
MeshDims nesting(const DeviceMesh& mesh, const Placements& placements, int64_t dim) {
  MeshDims order;
  for (size_t i = placements.size(); i-- > 0;) {
    if (!placements[i].is_any_shard() || placements[i].dim != dim) {
      continue;
    }
    if (is_nested_last(mesh, placements, i)) {
      order.push_back(static_cast<int64_t>(i));
    } else {
      order.insert(order.begin(), static_cast<int64_t>(i));
    }
  }
  return order;
}

// Shards that hold mesh dim m's shard of `dim`: those outside it. For an m that does not shard `dim`, the earlier mesh
// dims.
MeshDims outside(const MeshDims& order, int64_t m) {
  const auto found = std::find(order.begin(), order.end(), m);
  if (found != order.end()) {
    return MeshDims(order.begin(), found);
  }
  MeshDims earlier;
  for (const int64_t i : order) {
    if (i < m) {
      earlier.push_back(i);
    }
  }
  return earlier;
}

class Planner {
 public:
  Planner(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from, const Placements& to)
      : sizes_(global_sizes), mesh_(mesh), now_(from), to_(to) {
    for (size_t i = 0; i < from.size(); ++i) {
      plain_now_.push_back(is_nested_last(mesh, from, i) ? Shard(from[i].dim) : from[i]);
      plain_to_.push_back(is_nested_last(mesh, to, i) ? Shard(to[i].dim) : to[i]);
    }
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes_.size()); ++dim) {
      now_order_.push_back(nesting(mesh, from, dim));
      to_order_.push_back(nesting(mesh, to, dim));
    }
  }

  Steps plan() {
    undo_misplaced();
    // First to last, but a shard comes after the shards that hold it.
    for (bool progress = true; progress;) {
      progress = false;
      for (size_t m = 0; m < now_.size(); ++m) {
        if (!done(m) && ready(static_cast<int64_t>(m))) {
          change(static_cast<int64_t>(m), plain_to_[m]);
          progress = true;
        }
      }
    }
    return std::move(steps_);
  }

 private:
  bool done(size_t m) const { return plain_now_[m] == plain_to_[m]; }

  bool ready(int64_t m) const {
    if (!plain_to_[m].is_any_shard()) {
      return true;
    }
    const MeshDims holders = outside(to_order_[plain_to_[m].dim], m);
    return std::all_of(holders.begin(), holders.end(), [&](int64_t i) { return done(static_cast<size_t>(i)); });
  }

  // Gathers, innermost first, the shards that would not stay inside the same others.
  void undo_misplaced() {
    for (int64_t m = static_cast<int64_t>(now_.size()); m-- > 0;) {
      undo_if_misplaced(m);
    }
  }

  void undo_if_misplaced(int64_t m) {
    if (!plain_now_[m].is_any_shard()) {
      return;
    }
    const int64_t dim = plain_now_[m].dim;
    const bool strided = plain_now_[m].is_strided_shard() && plain_now_[m] != plain_to_[m];
    const MeshDims holders = outside(now_order_[dim], m);
    const bool held_alike =
        holders == outside(to_order_[dim], m) &&
        std::all_of(holders.begin(), holders.end(), [&](int64_t i) { return done(static_cast<size_t>(i)); });
    if (!strided && held_alike) {
      return;
    }
    // What is nested inside comes off first, whatever its mesh dim.
    const MeshDims order = now_order_[dim];
    const auto place = std::find(order.begin(), order.end(), m) - order.begin();
    for (size_t i = order.size(); i-- > static_cast<size_t>(place) + 1;) {
      change(order[i], Replicate());
    }
    change(m, Replicate());
  }

  // Elements of `dim` that the shard over mesh dim m divides.
  int64_t held(int64_t dim, int64_t m) const {
    int64_t size = sizes_[dim];
    for (const int64_t i : outside(now_order_[dim], m)) {
      // A rank outside the mesh plans as the first one does: what a plan costs is the same for all.
      const int64_t coordinate = mesh_.coordinate() ? (*mesh_.coordinate())[i] : 0;
      size = local_extent(size, mesh_.shape()[i], coordinate, plain_now_[i]);
    }
    return size;
  }

  void change(int64_t m, const Placement& target) {
    const Placement source = plain_now_[m];
    if (source == target) {
      return;
    }
    // A shard becomes partial, and a strided shard anything, by way of the whole.
    const bool strided = source.is_strided_shard() || target.is_strided_shard();
    if (!source.is_replicate() && !target.is_replicate() && (strided || target.is_partial())) {
      change(m, Replicate());
      change(m, target);
      return;
    }
    Step step{m, source, target, 0, 0};
    if (source.is_any_shard()) {
      step.size_from = held(source.dim, m);
      auto& order = now_order_[source.dim];
      order.erase(std::find(order.begin(), order.end(), m));
    }
    plain_now_[m] = target;
    if (target.is_any_shard()) {
      auto& order = now_order_[target.dim];
      order.push_back(m);
      step.size_to = held(target.dim, m);
    }
    steps_.push_back(step);
  }

  c10::IntArrayRef sizes_;
  const DeviceMesh& mesh_;
  Placements now_;
  Placements to_;
  Placements plain_now_;  // with shards that are nested last written as plain shards
  Placements plain_to_;
  c10::SmallVector<MeshDims, 6> now_order_;
  c10::SmallVector<MeshDims, 6> to_order_;
  Steps steps_;
};

struct LinkCost {
  double latency;
  double bandwidth;
};

// Numbers of the upstream model: an NVLink-like link inside a host, a fifth of it across hosts.
LinkCost link_cost(const DeviceMesh& mesh, int64_t mesh_dim) {
  int64_t devices = 1;
  for (int64_t i = mesh.ndim() - 1; i >= mesh_dim; --i) {
    devices *= mesh.shape()[i];
  }
  const bool inside_host = devices <= mesh.world()->info().hosts.least_ranks;  // alike on all ranks: they must choose alike
  return inside_host ? LinkCost{0.6, 87.7} : LinkCost{2.7, 87.7 * 0.22};
}

double parts_of(const Cuts& cuts, const DeviceMesh& mesh) {
  double parts = 1;
  for (const Cut& cut : cuts) {
    parts *= static_cast<double>(mesh.shape()[cut.mesh_dim]);
  }
  return parts;
}

// Of one collective over several mesh dims: the slowest link decides. `whole`: GB of the global tensor.
double price(const WideStep& step, double whole, const DeviceMesh& mesh) {
  if (step.kind == WideStep::Kind::kCut) {
    return 0;
  }
  double k = 1;
  for (const int64_t dim : step.mesh_dims) {
    k *= static_cast<double>(mesh.shape()[dim]);
  }
  const auto [latency, bandwidth] = link_cost(mesh, step.mesh_dims.front());
  double received = 0;
  double hops = k - 1;
  switch (step.kind) {
    case WideStep::Kind::kReduce:
      received = 2 * whole / parts_of(step.from, mesh) * (k - 1) / k;
      hops *= 2;
      break;
    case WideStep::Kind::kReduceScatter:
      received = whole / parts_of(step.from, mesh) * (k - 1) / k;
      break;
    case WideStep::Kind::kGather:
      received = whole / parts_of(step.to, mesh) * (k - 1) / k;
      break;
    default: {  // of what this rank shall hold, a share as large as its share of the tensor is here already
      double cut = 1;
      for (const Cut& c : step.from) {
        const bool moves = std::find(step.mesh_dims.begin(), step.mesh_dims.end(), c.mesh_dim) != step.mesh_dims.end();
        cut *= moves ? static_cast<double>(mesh.shape()[c.mesh_dim]) : 1;
      }
      received = whole / parts_of(step.to, mesh) * (1 - 1 / cut);
    }
  }
  return 6.6 + hops * latency + received / bandwidth * 1e6;
}

}  // namespace

bool communicates(const Step& step, const DeviceMesh& mesh) {
  if (step.wide) {
    return step.wide->kind != WideStep::Kind::kCut;
  }
  return !step.from.is_replicate() && mesh.shape()[step.mesh_dim] > 1;
}

Steps plan_redistribute(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                        const Placements& to) {
  if (!mesh.coordinate()) {
    return {};
  }
  Steps steps = plan_greedily(global_sizes, mesh, from, to);
  if (steps.size() < 2 ||
      std::none_of(steps.begin(), steps.end(), [&](const Step& s) { return communicates(s, mesh); })) {
    return steps;
  }
  constexpr int64_t kItemBytes = 4;  // plans must not depend on more than shapes and placements
  auto wide = plan_widely(global_sizes, mesh, from, to);
  const bool pays = wide && cost_of(*wide, global_sizes, kItemBytes, mesh, from) <
                                cost_of(steps, global_sizes, kItemBytes, mesh, from);
  return pays ? *std::move(wide) : steps;
}

Steps plan_greedily(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                    const Placements& to) {
  if (from == to) {
    return {};
  }
  if (from.size() == 1 && !from[0].is_strided_shard() && !to[0].is_strided_shard() &&
      !(from[0].is_shard() && to[0].is_partial()) && !(from[0].is_partial() && to[0].is_partial())) {
    return {Step{0, from[0], to[0], from[0].is_shard() ? global_sizes[from[0].dim] : 0,
                 to[0].is_shard() ? global_sizes[to[0].dim] : 0}};
  }
  return Planner(global_sizes, mesh, from, to).plan();
}

double redistribute_cost(c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
                         const Placements& from, const Placements& to) {
  if (from == to || std::all_of(from.begin(), from.end(), [](const auto& p) { return p.is_replicate(); })) {
    return 0;
  }
  for (size_t i = 0; i < from.size(); ++i) {
    if ((from[i].is_any_shard() || from[i].is_partial()) && to[i].is_partial() && from[i] != to[i]) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return cost_of(plan_greedily(global_sizes, mesh, from, to), global_sizes, item_bytes, mesh, from);
}

double cost_of(const Steps& steps, c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
               const Placements& from) {
  double gigabytes = static_cast<double>(item_bytes) / (1 << 30);
  for (const int64_t size : global_sizes) {
    gigabytes *= static_cast<double>(size);
  }
  const double whole = gigabytes;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].is_any_shard()) {
      gigabytes /= static_cast<double>(mesh.shape()[i]);
    }
  }
  double total = 0;
  for (const Step& step : steps) {
    if (step.wide) {
      total += price(*step.wide, whole, mesh);
      gigabytes = whole / parts_of(step.wide->to, mesh);
      continue;
    }
    const auto k = static_cast<double>(mesh.shape()[step.mesh_dim]);
    const double hops = k - 1;
    const auto link = link_cost(mesh, step.mesh_dim);
    const auto price = [&](double hop_count) {
      return 6.6 + hop_count * link.latency + gigabytes * hop_count / k / link.bandwidth * 1e6;
    };
    if (step.from.is_any_shard() && step.to.is_replicate()) {
      gigabytes *= k;
      total += price(hops);
    } else if (step.from.is_any_shard() && step.to.is_any_shard()) {
      total += price(hops) + 1.0;
    } else if (step.from.is_partial() && step.to.is_replicate()) {
      total += price(2 * hops);
    } else if (step.from.is_partial() && step.to.is_any_shard()) {
      total += price(hops);
      gigabytes /= k;
    } else if (step.to.is_any_shard()) {
      gigabytes /= k;
    }
  }
  return total;
}

}  // namespace tessera::detail
