// Runs the steps of a plan. The cuts determine the global indices that each rank holds before and after a step
// (Movement), so ranks exchange elements without exchanging any metadata.
#include <ATen/ATen.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

InFlight done(at::Tensor value) { return {std::move(value), {}, {}, false}; }

// Appends `then` to the work after the collective of a step.
InFlight with(InFlight started, std::function<at::Tensor(const at::Tensor&)> then) {
  started.finish = [before = std::move(started.finish), then = std::move(then), value = started.value] {
    return then(before ? before() : value);
  };
  return started;
}

// How values are encoded for a reduction. A partial norm of order p is reduced as the sum of p-th powers, of which the
// p-th root is taken; order 0 is a count and is summed; infinite orders are a maximum or minimum.
struct Travel {
  explicit Travel(const Placement& partial) : op(partial.reduce_op) {
    if (partial.kind == Placement::Kind::kNormPartial) {
      const double p = partial.norm_order();
      op = !std::isinf(p) ? ReduceOp::kSum : p > 0 ? ReduceOp::kMax : ReduceOp::kMin;
      order = std::isinf(p) ? 0 : p;
    }
  }
  at::Tensor packed(const at::Tensor& values) const { return order != 0 ? values.pow(order) : values; }
  InFlight unpacked(InFlight started) const {
    if (order == 0) return started;
    return with(std::move(started), [p = order](const at::Tensor& sum) { return sum.pow(1.0 / p); });
  }
  ReduceOp op;
  double order = 0;  // 0: values are sent unchanged
};

// Booleans are reduced as bytes: "any" (a sum) is the maximum, "all" (a product) is the minimum.
ReduceOp byte_op(ReduceOp op) {
  return op == ReduceOp::kProduct || op == ReduceOp::kMin ? ReduceOp::kMin : ReduceOp::kMax;
}

InFlight reduce(const at::Tensor& local, comm::Group& group, const Step& step) {
  const Travel travel(step.partial);
  const at::Tensor values = travel.packed(local);
  const bool boolean = values.scalar_type() == at::kBool;
  at::Tensor sum = boolean                 ? values.to(at::kByte, false, false, at::MemoryFormat::Contiguous)
                   : values.is_same(local) ? values.clone(at::MemoryFormat::Contiguous)
                                           : values.contiguous();
  comm::Pending work = comm::all_reduce(group, sum, boolean ? byte_op(travel.op) : travel.op, "redistribute");
  InFlight started{std::move(sum), std::move(work), {}, true};
  if (boolean) return with(std::move(started), [](const at::Tensor& bytes) { return bytes.to(at::kBool); });
  return travel.unpacked(std::move(started));
}

// Size of the largest part.
int64_t most_of(const std::vector<Part>& parts) {
  int64_t most = 0;
  for (const Part& part : parts) most = std::max(most, numel_of(part));
  return most;
}

// Whether parts, each padded to `most` elements, are contiguous without gaps: all are full up to the last one with
// elements.
bool fills(const std::vector<Part>& parts, int64_t most, int64_t whole) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (numel_of(parts[i]) != std::clamp<int64_t>(whole - static_cast<int64_t>(i) * most, 0, most)) return false;
  }
  return true;
}

// Every rank contributes `most` elements, so smaller parts are padded. There are three ways to assemble the result: a
// view, if the gathered rows are the whole tensor in order; a concatenation along one dim; else a copy of each part to
// its indices.
InFlight gather(const at::Tensor& local, comm::Group& group, std::shared_ptr<const Movement> movement) {
  const std::vector<Part>& parts = movement->before;
  const int64_t most = most_of(parts);
  at::Tensor mine = local.reshape({-1});
  if (mine.numel() < most) {
    mine = at::zeros({most}, local.options());
    mine.narrow(0, 0, local.numel()).copy_(local.reshape({-1}));
  }
  const at::Tensor all = at::empty({static_cast<int64_t>(parts.size()), most}, local.options());
  comm::Pending work = comm::all_gather_into(group, all, mine.contiguous(), "redistribute");
  return with({all, std::move(work), {}, true}, [movement, most](const at::Tensor& gathered) {
    const Part& whole = movement->wanted;
    const std::vector<Part>& parts = movement->before;
    const int64_t numel = numel_of(whole);
    if (fills(parts, most, numel) && in_order(whole, parts)) {
      return gathered.view({-1}).narrow(0, 0, numel).view(sizes_of(whole));
    }
    at::Tensor result = at::empty(sizes_of(whole), gathered.options());
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < parts.size(); ++i) {
      values.push_back(
          gathered.select(0, static_cast<int64_t>(i)).narrow(0, 0, numel_of(parts[i])).view(sizes_of(parts[i])));
    }
    if (const auto dim = dim_that_joins(whole, parts)) return at::cat_out(result, values, *dim);
    for (size_t i = 0; i < parts.size(); ++i) put(result, whole, values[i], parts[i]);
    return result;
  });
}

// The input of a reduce-scatter: one row for each rank, padded to the size of the largest part. If all parts are equal
// and in order, the local tensor is viewed instead of copied.
at::Tensor stacked(const at::Tensor& local, const Movement& movement, int64_t most) {
  const std::vector<Part>& parts = movement.after;
  const auto count = static_cast<int64_t>(parts.size());
  const bool ordered = fills(parts, most, local.numel()) && in_order(movement.held, parts);
  if (ordered && local.numel() == count * most) return local.contiguous().view({count, most});
  const Sizes sizes = sizes_of(parts[0]);
  if (std::ranges::all_of(parts, [&](const Part& part) { return sizes_of(part) == sizes; })) {
    std::vector<at::Tensor> pieces;
    for (const Part& part : parts) pieces.push_back(take(local, movement.held, part));
    return at::stack(pieces).reshape({count, most});
  }
  const at::Tensor all = at::zeros({count, most}, local.options());
  if (ordered) {
    all.view({-1}).narrow(0, 0, local.numel()).copy_(local.reshape({-1}));
    return all;
  }
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor piece = take(local, movement.held, parts[i]);
    all.select(0, i).narrow(0, 0, piece.numel()).view(piece.sizes()).copy_(piece);
  }
  return all;
}

InFlight reduce_scatter(const at::Tensor& local, comm::Group& group, const Step& step,
                        const std::shared_ptr<const Movement>& movement) {
  if (local.scalar_type() == at::kBool) {  // booleans are reduced as a whole, then cut
    return with(reduce(local, group, step), [movement](const at::Tensor& value) {
      return take(value, movement->held, movement->wanted).clone(at::MemoryFormat::Contiguous);
    });
  }
  const Travel travel(step.partial);
  const int64_t most = most_of(movement->after);
  const at::Tensor input = stacked(travel.packed(local), *movement, most);
  const at::Tensor output = at::empty({most}, local.options());
  comm::Pending work = comm::reduce_scatter_into(group, output, input, travel.op, "redistribute");
  InFlight started =
      with({output, std::move(work), {}, true}, [own = sizes_of(movement->wanted)](const at::Tensor& sums) {
        return sums.narrow(0, 0, c10::multiply_integers(own)).view(own);
      });
  return travel.unpacked(std::move(started));
}

// Each rank sends to each linked rank the elements that both this rank holds and the other needs, ordered by global
// index. The receiver computes the same intersection from the cuts, so it knows the size and the place of every
// element.
InFlight exchange(const at::Tensor& local, comm::Group& group, std::shared_ptr<const Movement> movement) {
  std::vector<at::Tensor> sent;
  std::vector<int64_t> sent_counts;
  std::vector<int64_t> received_counts;
  std::vector<Part> received;
  int64_t total = 0;
  for (size_t i = 0; i < movement->before.size(); ++i) {
    const bool linked = movement->linked[i];
    if (linked) sent.push_back(take(local, movement->held, common(movement->held, movement->after[i])).reshape({-1}));
    sent_counts.push_back(linked ? sent.back().numel() : 0);
    received.push_back(linked ? common(movement->before[i], movement->wanted) : Part{});
    received_counts.push_back(linked ? numel_of(received.back()) : 0);
    total += received_counts.back();
  }
  const at::Tensor input = at::cat(sent);
  const at::Tensor output = at::empty({total}, local.options());
  comm::Pending work = comm::all_to_all_single(group, output, input, received_counts, sent_counts, "redistribute");
  return with({output, std::move(work), {}, true},
              [movement, received_counts, received = std::move(received)](const at::Tensor& all) {
                const at::Tensor result = at::empty(sizes_of(movement->wanted), all.options());
                int64_t offset = 0;
                for (size_t i = 0; i < received.size(); ++i) {
                  if (received_counts[i] > 0) {
                    put(result, movement->wanted, all.narrow(0, offset, received_counts[i]).view(sizes_of(received[i])),
                        received[i]);
                    offset += received_counts[i];
                  }
                }
                return result;
              });
}

// Values on this rank whose reduction gives the replicated value. PyTorch divides a sum by the number of ranks, which
// rounds; here the first rank keeps the value and the others have zeros.
at::Tensor replicate_to_partial(const at::Tensor& local, const Placement& to, int64_t k, int64_t coordinate) {
  if (to.kind == Placement::Kind::kNormPartial) {
    if (to.norm_order() == 0) return local / static_cast<double>(k);
    return local / std::pow(static_cast<double>(k), 1.0 / to.norm_order());
  }
  switch (to.reduce_op) {
    case ReduceOp::kSum:  // no rounding
      return coordinate == 0 ? local : at::zeros_like(local);
    case ReduceOp::kProduct:
      return coordinate == 0 ? local : at::ones_like(local);
    default:
      return local;
  }
}

InFlight start_step(const at::Tensor& given, const DeviceMesh& mesh, const Step& step, bool may_alias) {
  const at::Tensor local = given.is_conj() || given.is_neg() ? given.resolve_conj().resolve_neg() : given;
  if (step.kind == Step::Kind::kSpread) {
    const int64_t dim = step.mesh_dims[0];
    return done(replicate_to_partial(local, step.partial, mesh.shape()[dim], (*mesh.coordinate())[dim]));
  }
  const auto movement = step.movement ? step.movement : work_out(step, mesh);
  if (step.kind == Step::Kind::kCut) {
    const at::Tensor part = take(local, movement->held, movement->wanted);
    return done(may_alias ? part.contiguous() : part.clone(at::MemoryFormat::Contiguous));
  }
  comm::Group& group = step.mesh_dims.size() == 1
                           ? *mesh.group(step.mesh_dims[0])
                           : *mesh.group(std::vector<int64_t>(step.mesh_dims.begin(), step.mesh_dims.end()));
  switch (step.kind) {
    case Step::Kind::kReduce:
      return reduce(local, group, step);
    case Step::Kind::kReduceScatter:
      return reduce_scatter(local, group, step, movement);
    case Step::Kind::kGather:
      return gather(local, group, movement);
    default:
      return exchange(local, group, movement);
  }
}

}  // namespace

// `finish` runs once, after the collective.
at::Tensor InFlight::end() {
  work.wait();
  pending = false;
  if (finish) value = std::exchange(finish, {})();
  return value;
}

// Steps before the last collective wait for their result. The last collective is only started; the local steps after it
// become part of `finish`, which keeps the mesh alive because it owns the group.
InFlight start_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias) {
  at::Tensor now = local;
  for (size_t i = 0; i < steps.size(); ++i) {
    InFlight started = start_step(now, mesh, steps[i], may_alias || i > 0);
    const bool rest_is_local = std::none_of(steps.begin() + static_cast<int64_t>(i) + 1, steps.end(), communicates);
    if (started.pending && rest_is_local) {
      if (i + 1 == steps.size()) return started;
      const Steps rest(steps.begin() + static_cast<int64_t>(i) + 1, steps.end());
      const auto owner = mesh.shared_from_this();
      return with(std::move(started),
                  [owner, rest](const at::Tensor& value) { return run_steps(value, *owner, rest, true); });
    }
    now = started.end();
  }
  return done(now.is_same(local) && !may_alias ? local.clone() : now);
}

at::Tensor run_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias) {
  return start_steps(local, mesh, steps, may_alias).end();
}

}  // namespace tessera
