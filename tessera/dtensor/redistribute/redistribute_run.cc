#include <ATen/ATen.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/autograd.h"
#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::detail {

namespace {

at::Tensor pad(const at::Tensor& tensor, int64_t dim, int64_t size) {
  if (tensor.size(dim) == size) {
    return tensor.contiguous();
  }
  Sizes sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes[dim] = size;
  at::Tensor padded = at::zeros(sizes, tensor.options());
  padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor);
  return padded;
}

bool leads(const at::Tensor& tensor, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    if (tensor.size(i) != 1) {
      return false;
    }
  }
  return true;
}

InFlight done(at::Tensor value) { return {std::move(value), {}, {}, false}; }

// One tensor a rank, stacked along a new first dim.
InFlight gather_stacked(const at::Tensor& part, comm::Group& group) {
  Sizes sizes{group.size()};
  sizes.append(part.sizes().begin(), part.sizes().end());
  at::Tensor all = at::empty(sizes, part.options());
  comm::Pending work = comm::all_gather_into(group, all, part, "redistribute");
  return {std::move(all), std::move(work), {}, true};
}

InFlight shard_to_replicate(const at::Tensor& local, comm::Group& group, int64_t dim, int64_t n) {
  const int64_t k = group.size();
  const int64_t chunk = (n + k - 1) / k;
  Sizes sizes(local.sizes().begin(), local.sizes().end());
  sizes[dim] = k * chunk;
  const bool in_order = leads(local, dim);
  return with(gather_stacked(pad(local, dim, chunk), group), [=](const at::Tensor& all) {
    if (in_order) {
      return all.view(sizes).narrow(dim, 0, n).contiguous();
    }
    std::vector<at::Tensor> parts;
    for (int64_t i = 0; i < k; ++i) {
      parts.push_back(all.select(0, i).narrow(dim, 0, local_range(n, k, i).size));
    }
    return at::cat(parts, dim);
  });
}

InFlight strided_to_replicate(const at::Tensor& local, comm::Group& group, const Placement& placement, int64_t n) {
  const int64_t k = group.size();
  const int64_t dim = placement.dim;
  int64_t most = 0;
  for (int64_t i = 0; i < k; ++i) {
    most = std::max(most, local_extent(n, k, i, placement));
  }
  const int64_t piece = std::max<int64_t>((n + placement.split_factor - 1) / placement.split_factor, 1);
  return with(gather_stacked(pad(local, dim, most), group), [=](const at::Tensor& all) {
    std::vector<at::Tensor> parts;
    std::vector<int64_t> taken(k, 0);
    for (int64_t start = 0; start < n; start += piece) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t size = local_range(std::min(piece, n - start), k, i).size;
        parts.push_back(all.select(0, i).narrow(dim, taken[i], size));
        taken[i] += size;
      }
    }
    return parts.empty() ? all.select(0, 0).contiguous() : at::cat(parts, dim);
  });
}

at::Tensor replicate_to_shard(const at::Tensor& local, const Placement& placement, int64_t n, int64_t k,
                              int64_t coordinate, bool may_alias) {
  if (placement.is_shard()) {
    const LocalRange range = local_range(n, k, coordinate);
    const at::Tensor part = local.narrow(placement.dim, range.offset, range.size);
    return may_alias ? part.contiguous() : part.clone(at::MemoryFormat::Contiguous);
  }
  const int64_t piece = std::max<int64_t>((n + placement.split_factor - 1) / placement.split_factor, 1);
  std::vector<at::Tensor> parts;
  for (int64_t start = 0; start < n; start += piece) {
    const LocalRange range = local_range(std::min(piece, n - start), k, coordinate);
    parts.push_back(local.narrow(placement.dim, start + range.offset, range.size));
  }
  return parts.empty() ? local.clone(at::MemoryFormat::Contiguous) : at::cat(parts, placement.dim);
}

InFlight shard_to_shard(const at::Tensor& local, comm::Group& group, const Step& step) {
  const int64_t k = group.size();
  const int64_t r = group.rank();
  Sizes sizes(local.sizes().begin(), local.sizes().end());
  std::vector<at::Tensor> sent;
  std::vector<int64_t> input_splits;
  std::vector<int64_t> output_splits;
  std::vector<Sizes> received;
  for (int64_t i = 0; i < k; ++i) {
    const LocalRange range = local_range(step.size_to, k, i);
    sent.push_back(local.narrow(step.to.dim, range.offset, range.size).reshape({-1}));
    input_splits.push_back(sent.back().numel());
    Sizes part = sizes;
    part[step.from.dim] = local_range(step.size_from, k, i).size;
    part[step.to.dim] = local_range(step.size_to, k, r).size;
    output_splits.push_back(c10::multiply_integers(part));
    received.push_back(std::move(part));
  }
  const at::Tensor input = at::cat(sent);
  int64_t total = 0;
  for (const int64_t count : output_splits) {
    total += count;
  }
  at::Tensor output = at::empty({total}, local.options());
  comm::Pending work = comm::all_to_all_single(group, output, input, output_splits, input_splits, "redistribute");
  return with({output, std::move(work), {}, true},
              [=, received = std::move(received), dim = step.from.dim](const at::Tensor& all) {
                std::vector<at::Tensor> parts;
                int64_t offset = 0;
                for (int64_t i = 0; i < k; ++i) {
                  parts.push_back(all.narrow(0, offset, output_splits[i]).view(received[i]));
                  offset += output_splits[i];
                }
                return at::cat(parts, dim);
              });
}

InFlight partial_to_replicate(const at::Tensor& local, comm::Group& group, ReduceOp op) {
  const bool boolean = local.scalar_type() == at::kBool;
  at::Tensor sum = boolean ? local.to(at::kByte, false, false, at::MemoryFormat::Contiguous)
                           : local.clone(at::MemoryFormat::Contiguous);
  comm::Pending work = comm::all_reduce(group, sum, boolean ? byte_op(op) : op, "redistribute");
  InFlight started{std::move(sum), std::move(work), {}, true};
  return boolean ? with(std::move(started), [](const at::Tensor& bytes) { return bytes.to(at::kBool); })
                 : std::move(started);
}

InFlight partial_to_shard(const at::Tensor& local, comm::Group& group, ReduceOp op, int64_t dim, int64_t n) {
  if (local.scalar_type() == at::kBool) {
    return with(partial_to_replicate(local, group, op),
                [=, k = group.size(), r = group.rank()](const at::Tensor& whole) {
                  return replicate_to_shard(whole, Shard(dim), n, k, r, false);
                });
  }
  const int64_t k = group.size();
  const int64_t chunk = (n + k - 1) / k;
  Sizes part(local.sizes().begin(), local.sizes().end());
  part[dim] = chunk;
  const bool in_order = n == k * chunk && leads(local, dim);
  at::Tensor input;
  if (in_order) {
    input = local.contiguous();
  } else {
    Sizes stacked{k};
    stacked.append(part.begin(), part.end());
    input = n == k * chunk ? at::empty(stacked, local.options()) : at::zeros(stacked, local.options());
    for (int64_t i = 0; i < k; ++i) {
      const LocalRange range = local_range(n, k, i);
      input.select(0, i).narrow(dim, 0, range.size).copy_(local.narrow(dim, range.offset, range.size));
    }
  }
  at::Tensor output = at::empty(part, local.options());
  comm::Pending work = comm::reduce_scatter_into(group, output, input, op, "redistribute");
  return with({output, std::move(work), {}, true},
              [=, size = local_range(n, k, group.rank()).size](const at::Tensor& part) {
                return part.narrow(dim, 0, size).contiguous();
              });
}

// A norm's parts are combined as the p-th root of the sum of their p-th powers; order 0 counts, infinite ones are
// extremes.
InFlight norm_to(const at::Tensor& local, comm::Group& group, double order, const Step& step) {
  const auto reduce = [&](const at::Tensor& values, ReduceOp op) {
    return step.to.is_shard() ? partial_to_shard(values, group, op, step.to.dim, step.size_to)
                              : partial_to_replicate(values, group, op);
  };
  if (order == 0) {
    return reduce(local, ReduceOp::kSum);
  }
  if (std::isinf(order)) {
    return reduce(local, order > 0 ? ReduceOp::kMax : ReduceOp::kMin);
  }
  return with(reduce(local.pow(order), ReduceOp::kSum),
              [order](const at::Tensor& sum) { return sum.pow(1.0 / order); });
}

at::Tensor replicate_to_partial(const at::Tensor& local, const Placement& to, int64_t k, int64_t coordinate) {
  if (to.kind == Placement::Kind::kNormPartial) {
    if (to.norm_order() == 0) {
      return local / static_cast<double>(k);
    }
    return local / std::pow(static_cast<double>(k), 1.0 / to.norm_order());
  }
  switch (to.reduce_op) {
    case ReduceOp::kSum:
      if (at::isFloatingType(local.scalar_type()) || at::isComplexType(local.scalar_type())) {
        return local / static_cast<double>(k);
      }
      return coordinate == 0 ? local : at::zeros_like(local);
    case ReduceOp::kProduct:
      return coordinate == 0 ? local : at::ones_like(local);
    default:
      return local;
  }
}

InFlight start_step(const at::Tensor& given, const DeviceMesh& mesh, const Step& step, bool may_alias) {
  const at::Tensor local = given.is_conj() || given.is_neg() ? given.resolve_conj().resolve_neg() : given;
  if (step.wide) {
    return start_wide(local, mesh, *step.wide);
  }
  const int64_t k = mesh.shape()[step.mesh_dim];
  const int64_t coordinate = (*mesh.coordinate())[step.mesh_dim];
  if (k == 1) {
    return done(may_alias ? local : local.clone());
  }
  if (step.from.is_replicate()) {
    return done(step.to.is_any_shard() ? replicate_to_shard(local, step.to, step.size_to, k, coordinate, may_alias)
                                       : replicate_to_partial(local, step.to, k, coordinate));
  }
  comm::Group& group = *mesh.group(step.mesh_dim);
  if (step.from.is_any_shard()) {
    if (step.to.is_any_shard()) {
      return shard_to_shard(local, group, step);
    }
    return step.from.is_shard() ? shard_to_replicate(local, group, step.from.dim, step.size_from)
                                : strided_to_replicate(local, group, step.from, step.size_from);
  }
  if (step.from.kind == Placement::Kind::kNormPartial) {
    return norm_to(local, group, step.from.norm_order(), step);
  }
  return step.to.is_shard() ? partial_to_shard(local, group, step.from.reduce_op, step.to.dim, step.size_to)
                            : partial_to_replicate(local, group, step.from.reduce_op);
}

}  // namespace

at::Tensor cut_shard(const at::Tensor& tensor, const Step& step, int64_t k, int64_t i) {
  return replicate_to_shard(tensor, step.to, step.size_to, k, i, true);
}

ReduceOp byte_op(ReduceOp op) {
  return op == ReduceOp::kProduct || op == ReduceOp::kMin ? ReduceOp::kMin : ReduceOp::kMax;
}

at::Tensor InFlight::end() {
  work.wait();
  pending = false;
  if (finish) {
    value = std::exchange(finish, {})();
  }
  return value;
}

InFlight with(InFlight started, std::function<at::Tensor(const at::Tensor&)> then) {
  started.finish = [before = std::move(started.finish), then = std::move(then), value = started.value] {
    return then(before ? before() : value);
  };
  return started;
}

InFlight start_steps(const at::Tensor& local, const DeviceMesh& mesh, const Steps& steps, bool may_alias) {
  at::Tensor now = local;
  for (size_t i = 0; i < steps.size(); ++i) {
    InFlight started = start_step(now, mesh, steps[i], may_alias || i > 0);
    const bool rest_is_local = std::none_of(steps.begin() + static_cast<int64_t>(i) + 1, steps.end(),
                                            [&](const Step& later) { return communicates(later, mesh); });
    if (started.pending && rest_is_local) {
      if (i + 1 == steps.size()) {
        return started;
      }
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

}  // namespace tessera::detail
