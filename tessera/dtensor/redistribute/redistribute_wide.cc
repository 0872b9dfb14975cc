// Steps over several mesh dims at once: one collective over the group of all ranks that differ in those dims. What lies
// where follows from the cuts: each rank knows the global indices (Runs) that any other rank holds before and after.
#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/redistribute/redistribute.h"

namespace tessera::detail {

namespace {

using Coordinate = c10::SmallVector<int64_t, 4>;
using Part = c10::SmallVector<Runs, 6>;  // by tensor dim: the global indices that a rank holds

// The ranks of the group over step.mesh_dims, in its order.
std::vector<Coordinate> members(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    count *= mesh.shape()[dim];
  }
  std::vector<Coordinate> all(count, Coordinate(mesh.coordinate()->begin(), mesh.coordinate()->end()));
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    for (size_t d = dims.size(); d-- > 0;) {
      all[i][dims[d]] = rest % mesh.shape()[dims[d]];
      rest /= mesh.shape()[dims[d]];
    }
  }
  return all;
}

Part part_of(const WideStep& step, const DeviceMesh& mesh, const Cuts& cuts, const Coordinate& coordinate) {
  Part part;
  for (size_t dim = 0; dim < step.global_sizes.size(); ++dim) {
    part.push_back(runs_of(step.global_sizes[dim], static_cast<int64_t>(dim), mesh, cuts, coordinate));
  }
  return part;
}

Sizes sizes_of(const Part& part) {
  Sizes sizes;
  for (const Runs& runs : part) {
    sizes.push_back(length(runs));
  }
  return sizes;
}

// Runs are ascending, so the common ones are too.
Part common(const Part& a, const Part& b) {
  Part both;
  for (size_t dim = 0; dim < a.size(); ++dim) {
    Runs runs;
    for (size_t i = 0, j = 0; i < a[dim].size() && j < b[dim].size();) {
      const Run& x = a[dim][i];
      const Run& y = b[dim][j];
      const int64_t start = std::max(x.start, y.start);
      const int64_t end = std::min(x.start + x.size, y.start + y.size);
      if (start < end) {
        runs.push_back({start, end - start});
      }
      (x.start + x.size < y.start + y.size ? i : j) += 1;
    }
    both.push_back(std::move(runs));
  }
  return both;
}

// Where the elements of `inner`, which `outer` holds, lie in outer's memory.
Runs positions(const Runs& outer, const Runs& inner) {
  Runs found;
  int64_t before = 0;
  auto next = inner.begin();
  for (const Run& run : outer) {
    while (next != inner.end() && next->start < run.start + run.size) {
      const int64_t at = before + next->start - run.start;
      if (!found.empty() && found.back().start + found.back().size == at) {
        found.back().size += next->size;
      } else {
        found.push_back({at, next->size});
      }
      ++next;
    }
    before += run.size;
  }
  return found;
}

// The elements of `wanted` from a tensor that holds `held`.
at::Tensor take(const at::Tensor& tensor, const Part& held, const Part& wanted) {
  at::Tensor taken = tensor;
  for (size_t dim = 0; dim < held.size(); ++dim) {
    const Runs places = positions(held[dim], wanted[dim]);
    const auto d = static_cast<int64_t>(dim);
    if (places.empty()) {
      taken = taken.narrow(d, 0, 0);
    } else if (places.size() == 1) {
      taken = taken.narrow(d, places[0].start, places[0].size);
    } else {
      std::vector<at::Tensor> pieces;
      for (const Run& place : places) {
        pieces.push_back(taken.narrow(d, place.start, place.size));
      }
      taken = at::cat(pieces, d);
    }
  }
  return taken;
}

// Writes `values`, the elements of `given`, to their places in a tensor that holds `held`.
void put(const at::Tensor& tensor, const Part& held, const at::Tensor& values, const Part& given, size_t dim = 0) {
  if (dim == held.size()) {
    tensor.copy_(values);
    return;
  }
  const auto d = static_cast<int64_t>(dim);
  int64_t taken = 0;
  for (const Run& place : positions(held[dim], given[dim])) {
    put(tensor.narrow(d, place.start, place.size), held, values.narrow(d, taken, place.size), given, dim + 1);
    taken += place.size;
  }
}

int64_t numel_of(const Part& part) { return c10::multiply_integers(sizes_of(part)); }

InFlight reduce(const at::Tensor& local, comm::Group& group, const WideStep& step) {
  const bool boolean = local.scalar_type() == at::kBool;
  at::Tensor sum = boolean ? local.to(at::kByte, false, false, at::MemoryFormat::Contiguous)
                           : local.clone(at::MemoryFormat::Contiguous);
  comm::Pending work = comm::all_reduce(group, sum, boolean ? byte_op(step.op) : step.op, "redistribute");
  InFlight started{std::move(sum), std::move(work), {}, true};
  return boolean ? with(std::move(started), [](const at::Tensor& bytes) { return bytes.to(at::kBool); })
                 : std::move(started);
}

InFlight gather(const at::Tensor& local, const DeviceMesh& mesh, comm::Group& group, const WideStep& step) {
  std::vector<Part> parts;
  int64_t most = 0;
  for (const auto& member : members(mesh, step.mesh_dims)) {
    parts.push_back(part_of(step, mesh, step.from, member));
    most = std::max(most, numel_of(parts.back()));
  }
  at::Tensor mine = at::zeros({most}, local.options());
  mine.narrow(0, 0, local.numel()).copy_(local.reshape({-1}));
  const at::Tensor all = at::empty({static_cast<int64_t>(parts.size()), most}, local.options());
  comm::Pending work = comm::all_gather_into(group, all, mine, "redistribute");
  const Coordinate self(mesh.coordinate()->begin(), mesh.coordinate()->end());
  return with({all, std::move(work), {}, true}, [parts = std::move(parts), whole = part_of(step, mesh, step.to, self)](
                                                    const at::Tensor& gathered) {
    const at::Tensor result = at::empty(sizes_of(whole), gathered.options());
    for (size_t i = 0; i < parts.size(); ++i) {
      const at::Tensor values =
          gathered.select(0, static_cast<int64_t>(i)).narrow(0, 0, numel_of(parts[i])).view(sizes_of(parts[i]));
      put(result, whole, values, parts[i]);
    }
    return result;
  });
}

InFlight reduce_scatter(const at::Tensor& local, const DeviceMesh& mesh, comm::Group& group, const WideStep& step) {
  if (local.scalar_type() == at::kBool) {  // by way of the whole
    WideStep whole = step;
    whole.kind = WideStep::Kind::kReduce;
    WideStep cut = step;
    cut.kind = WideStep::Kind::kCut;
    return with(reduce(local, group, whole), [owner = mesh.shared_from_this(), cut](const at::Tensor& value) {
      return start_wide(value, *owner, cut).end();
    });
  }
  const Coordinate self(mesh.coordinate()->begin(), mesh.coordinate()->end());
  const Part held = part_of(step, mesh, step.from, self);
  std::vector<at::Tensor> pieces;
  int64_t most = 0;
  Sizes own;
  for (const auto& member : members(mesh, step.mesh_dims)) {
    const Part wanted = part_of(step, mesh, step.to, member);
    pieces.push_back(take(local, held, wanted).reshape({-1}));
    most = std::max(most, pieces.back().numel());
    if (member == self) {
      own = sizes_of(wanted);
    }
  }
  const at::Tensor input = at::zeros({static_cast<int64_t>(pieces.size()), most}, local.options());
  for (size_t i = 0; i < pieces.size(); ++i) {
    input.select(0, static_cast<int64_t>(i)).narrow(0, 0, pieces[i].numel()).copy_(pieces[i]);
  }
  const at::Tensor output = at::empty({most}, local.options());
  comm::Pending work = comm::reduce_scatter_into(group, output, input, step.op, "redistribute");
  return with({output, std::move(work), {}, true}, [own](const at::Tensor& sums) {
    return sums.narrow(0, 0, c10::multiply_integers(own)).view(own).contiguous();
  });
}

// An element that several ranks hold comes from the one that agrees with the receiver on the mesh dims that do not cut
// what is held; it is the receiver itself where it has it.
InFlight exchange(const at::Tensor& local, const DeviceMesh& mesh, comm::Group& group, const WideStep& step) {
  const Coordinate self(mesh.coordinate()->begin(), mesh.coordinate()->end());
  const auto copies = [&](const Coordinate& a, const Coordinate& b) {
    return std::all_of(step.mesh_dims.begin(), step.mesh_dims.end(), [&](int64_t dim) {
      return a[dim] == b[dim] ||
             std::any_of(step.from.begin(), step.from.end(), [&](const Cut& c) { return c.mesh_dim == dim; });
    });
  };
  const Part held = part_of(step, mesh, step.from, self);
  const Part mine = part_of(step, mesh, step.to, self);
  std::vector<at::Tensor> sent;
  std::vector<int64_t> sent_counts;
  std::vector<int64_t> received_counts;
  std::vector<Part> received;
  for (const auto& member : members(mesh, step.mesh_dims)) {
    const bool linked = copies(self, member);
    if (linked) {
      sent.push_back(take(local, held, common(held, part_of(step, mesh, step.to, member))).reshape({-1}));
    }
    sent_counts.push_back(linked ? sent.back().numel() : 0);
    received.push_back(linked ? common(part_of(step, mesh, step.from, member), mine) : Part{});
    received_counts.push_back(linked ? numel_of(received.back()) : 0);
  }
  const at::Tensor input = at::cat(sent);
  int64_t total = 0;
  for (const int64_t count : received_counts) {
    total += count;
  }
  const at::Tensor output = at::empty({total}, local.options());
  comm::Pending work = comm::all_to_all_single(group, output, input, received_counts, sent_counts, "redistribute");
  return with({output, std::move(work), {}, true}, [=, received = std::move(received)](const at::Tensor& all) {
    const at::Tensor result = at::empty(sizes_of(mine), all.options());
    int64_t offset = 0;
    for (size_t i = 0; i < received.size(); ++i) {
      if (received_counts[i] > 0) {
        put(result, mine, all.narrow(0, offset, received_counts[i]).view(sizes_of(received[i])), received[i]);
        offset += received_counts[i];
      }
    }
    return result;
  });
}

// The planner. `now` are the cuts so far.
class WidePlanner {
 public:
  WidePlanner(c10::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& from, const Placements& to)
      : sizes_(sizes.begin(), sizes.end()),
        mesh_(mesh),
        from_(from),
        to_(to),
        now_(real(cuts_of(mesh, from))),
        goal_(real(cuts_of(mesh, to))) {}

  bool possible() const {
    for (size_t m = 0; m < from_.size(); ++m) {
      if (from_[m] != to_[m] && (to_[m].is_partial() || from_[m].kind == Placement::Kind::kNormPartial)) {
        return false;
      }
    }
    return true;
  }

  // cut_first: what will be cut anyway is cut before the reductions, which then have less to move.
  Steps plan(bool cut_first) {
    if (cut_first) {
      Cuts cut = now_;
      for (const Cut& c : goal_) {
        if (from_[c.mesh_dim].is_replicate()) {
          cut.push_back(c);
        }
      }
      change(WideStep::Kind::kCut, {}, cut, ReduceOp::kSum);
    }
    reduce_partials(/*scatter=*/true);
    reduce_partials(/*scatter=*/false);
    move();
    return std::move(steps_);
  }

 private:
  // Mesh dims of one rank cut nothing.
  Cuts real(Cuts cuts) const {
    Cuts kept;
    for (const Cut& cut : cuts) {
      if (mesh_.shape()[cut.mesh_dim] > 1) {
        kept.push_back(cut);
      }
    }
    return kept;
  }

  void change(WideStep::Kind kind, std::vector<int64_t> dims, const Cuts& to, ReduceOp op) {
    const bool only_order = kind == WideStep::Kind::kCut && to == now_;
    if (!only_order) {
      auto step = std::make_shared<WideStep>(WideStep{kind, std::move(dims), now_, to, sizes_, op});
      steps_.push_back(Step{0, Replicate(), Replicate(), 0, 0, std::move(step)});
    }
    now_ = to;
  }

  void reduce_partials(bool scatter) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      std::vector<int64_t> dims;
      for (size_t m = 0; m < from_.size(); ++m) {
        if (from_[m].is_partial(op) && from_[m] != to_[m] && mesh_.shape()[m] > 1 && to_[m].is_any_shard() == scatter) {
          dims.push_back(static_cast<int64_t>(m));
        }
      }
      if (dims.empty()) {
        continue;
      }
      Cuts cuts = now_;
      for (const Cut& c : goal_) {
        if (scatter && std::find(dims.begin(), dims.end(), c.mesh_dim) != dims.end()) {
          cuts.push_back(c);
        }
      }
      change(scatter ? WideStep::Kind::kReduceScatter : WideStep::Kind::kReduce, dims, cuts, op);
    }
  }

  static Cuts of_dim(const Cuts& cuts, int64_t dim) {
    Cuts found;
    std::copy_if(cuts.begin(), cuts.end(), std::back_inserter(found), [dim](const Cut& c) { return c.dim == dim; });
    return found;
  }

  // From the cuts so far to the goal, in one step over the mesh dims whose cuts differ.
  void move() {
    std::vector<int64_t> dims;
    bool undone = false;  // some cut is taken back
    bool made = false;    // some cut is new
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes_.size()); ++dim) {
      const Cuts now = of_dim(now_, dim);
      const Cuts goal = of_dim(goal_, dim);
      const auto same = static_cast<size_t>(
          std::mismatch(now.begin(), now.begin() + std::min(now.size(), goal.size()), goal.begin()).first -
          now.begin());
      undone = undone || same < now.size();
      made = made || same < goal.size();
      for (const auto* list : {&now, &goal}) {
        for (size_t i = same; i < list->size(); ++i) {
          dims.push_back((*list)[i].mesh_dim);
        }
      }
    }
    std::sort(dims.begin(), dims.end());
    dims.erase(std::unique(dims.begin(), dims.end()), dims.end());
    if (undone || made) {
      change(!undone ? WideStep::Kind::kCut
             : made  ? WideStep::Kind::kExchange
                     : WideStep::Kind::kGather,
             dims, goal_, ReduceOp::kSum);
    }
  }

  Sizes sizes_;
  const DeviceMesh& mesh_;
  const Placements& from_;
  const Placements& to_;
  Cuts now_;
  Cuts goal_;
  Steps steps_;
};

}  // namespace

InFlight start_wide(const at::Tensor& local, const DeviceMesh& mesh, const WideStep& step) {
  const Coordinate self(mesh.coordinate()->begin(), mesh.coordinate()->end());
  if (step.kind == WideStep::Kind::kCut) {
    const at::Tensor part = take(local, part_of(step, mesh, step.from, self), part_of(step, mesh, step.to, self));
    return {part.clone(at::MemoryFormat::Contiguous), {}, {}, false};
  }
  comm::Group& group = *mesh.group(step.mesh_dims);
  switch (step.kind) {
    case WideStep::Kind::kReduce:
      return reduce(local, group, step);
    case WideStep::Kind::kReduceScatter:
      return reduce_scatter(local, mesh, group, step);
    case WideStep::Kind::kGather:
      return gather(local, mesh, group, step);
    default:
      return exchange(local, mesh, group, step);
  }
}

std::optional<Steps> plan_widely(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& from,
                                 const Placements& to) {
  if (!WidePlanner(global_sizes, mesh, from, to).possible()) {
    return std::nullopt;
  }
  Steps cut_late = WidePlanner(global_sizes, mesh, from, to).plan(false);
  Steps cut_early = WidePlanner(global_sizes, mesh, from, to).plan(true);
  const bool early = cost_of(cut_early, global_sizes, 4, mesh, from) < cost_of(cut_late, global_sizes, 4, mesh, from);
  return early ? cut_early : cut_late;
}

}  // namespace tessera::detail
