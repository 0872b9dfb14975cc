// Runs the steps of a plan. The splits determine the global indices that each rank holds before and after a step
// (TransferPlan), so ranks exchange elements without exchanging any metadata.
#include <ATen/ATen.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

PendingStep finished(at::Tensor value) { return {std::move(value), {}, {}, false}; }

// Appends `then` to started.finish, the function that runs after the collective of a step. `then` receives the result
// of started.finish, or started.value if started.finish is not set.
PendingStep then_finish(PendingStep started, std::function<at::Tensor(const at::Tensor&)> then) {
  started.finish = [before = std::move(started.finish), then = std::move(then), value = started.value] {
    return then(before ? before() : value);
  };
  return started;
}

// How values are encoded before a reduction and decoded after it. Partial norms of order p are raised to the p-th
// power, summed, and the p-th root is taken. Norms of order 0 are counts and are summed. Norms of infinite order are
// reduced by maximum or minimum.
struct ReductionEncoding {
  explicit ReductionEncoding(const Placement& partial) : op(partial.reduce_op) {
    if (partial.kind == Placement::Kind::kNormPartial) {
      const double p = partial.norm_order();
      op = !std::isinf(p) ? ReduceOp::kSum : p > 0 ? ReduceOp::kMax : ReduceOp::kMin;
      order = std::isinf(p) ? 0 : p;
    }
  }
  at::Tensor encode(const at::Tensor& values) const { return order != 0 ? values.pow(order) : values; }
  PendingStep decode_after(PendingStep started) const {
    if (order == 0) return started;
    return then_finish(std::move(started), [p = order](const at::Tensor& sum) { return sum.pow(1.0 / p); });
  }
  ReduceOp op;
  double order = 0;  // 0: values are sent unchanged
};

// Booleans are reduced as bytes. A sum ("any") becomes the maximum, a product ("all") becomes the minimum.
ReduceOp byte_op(ReduceOp op) {
  return op == ReduceOp::kProduct || op == ReduceOp::kMin ? ReduceOp::kMin : ReduceOp::kMax;
}

PendingStep reduce(const at::Tensor& local, comm::Group& group, const RedistributeStep& step) {
  const ReductionEncoding encoding(step.partial);
  const at::Tensor values = encoding.encode(local);
  const bool boolean = values.scalar_type() == at::kBool;
  at::Tensor sum = boolean                 ? values.to(at::kByte, false, false, at::MemoryFormat::Contiguous)
                   : values.is_same(local) ? values.clone(at::MemoryFormat::Contiguous)
                                           : values.contiguous();
  comm::PendingCollective work =
      comm::all_reduce(group, sum, boolean ? byte_op(encoding.op) : encoding.op, "redistribute");
  PendingStep started{std::move(sum), std::move(work), {}, true};
  if (boolean) return then_finish(std::move(started), [](const at::Tensor& bytes) { return bytes.to(at::kBool); });
  return encoding.decode_after(std::move(started));
}

// Returns the number of elements of the largest part. A part is the set of indices that one rank holds.
int64_t largest_part_numel(const std::vector<ShardIndices>& parts) {
  int64_t largest = 0;
  for (const ShardIndices& part : parts) largest = std::max(largest, numel_of(part));
  return largest;
}

// Whether the elements of the parts follow one another without padding between them if each part is padded to
// `padded_numel` elements: every part before the last one with elements has `padded_numel` elements. `whole` is the
// number of all elements.
bool has_no_gaps(const std::vector<ShardIndices>& parts, int64_t padded_numel, int64_t whole) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t left = whole - static_cast<int64_t>(i) * padded_numel;
    if (numel_of(parts[i]) != std::clamp<int64_t>(left, 0, padded_numel)) return false;
  }
  return true;
}

// Starts an all-gather. Every rank sends `padded_numel` elements, so smaller parts are padded. After the collective the
// result is assembled in one of three ways: as a view, if the gathered rows in order are the memory of the whole
// tensor; as a concatenation along one dim; else by copying each part to its indices.
PendingStep gather(const at::Tensor& local, comm::Group& group, std::shared_ptr<const TransferPlan> transfer) {
  const std::vector<ShardIndices>& parts = transfer->parts_before;
  const int64_t padded_numel = largest_part_numel(parts);
  at::Tensor mine = local.reshape({-1});
  if (mine.numel() < padded_numel) {
    mine = at::zeros({padded_numel}, local.options());
    mine.narrow(0, 0, local.numel()).copy_(local.reshape({-1}));
  }
  const at::Tensor all = at::empty({static_cast<int64_t>(parts.size()), padded_numel}, local.options());
  comm::PendingCollective work = comm::all_gather_into(group, all, mine.contiguous(), "redistribute");
  return then_finish({all, std::move(work), {}, true}, [transfer, padded_numel](const at::Tensor& gathered) {
    const ShardIndices& whole = transfer->needed_part;
    const std::vector<ShardIndices>& parts = transfer->parts_before;
    const int64_t numel = numel_of(whole);
    if (has_no_gaps(parts, padded_numel, numel) && is_contiguous_concat(whole, parts)) {
      return gathered.view({-1}).narrow(0, 0, numel).view(sizes_of(whole));
    }
    at::Tensor result = at::empty(sizes_of(whole), gathered.options());
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < parts.size(); ++i) {
      values.push_back(
          gathered.select(0, static_cast<int64_t>(i)).narrow(0, 0, numel_of(parts[i])).view(sizes_of(parts[i])));
    }
    if (const auto dim = concat_dim(whole, parts)) return at::cat_out(result, values, *dim);
    for (size_t i = 0; i < parts.size(); ++i) copy_part_into(result, whole, values[i], parts[i]);
    return result;
  });
}

// Returns the input of a reduce-scatter: row i has the elements of the part of rank i, padded to the size of the
// largest part. If all parts have the same size and their concatenation is the local tensor's memory, the result is a
// view of the local tensor.
at::Tensor pack_reduce_scatter_input(const at::Tensor& local, const TransferPlan& transfer, int64_t padded_numel) {
  const std::vector<ShardIndices>& parts = transfer.parts_after;
  const auto count = static_cast<int64_t>(parts.size());
  const bool ordered =
      has_no_gaps(parts, padded_numel, local.numel()) && is_contiguous_concat(transfer.held_part, parts);
  if (ordered && local.numel() == count * padded_numel) return local.contiguous().view({count, padded_numel});
  const Sizes sizes = sizes_of(parts[0]);
  if (std::ranges::all_of(parts, [&](const ShardIndices& part) { return sizes_of(part) == sizes; })) {
    std::vector<at::Tensor> pieces;
    for (const ShardIndices& part : parts) pieces.push_back(slice_part(local, transfer.held_part, part));
    return at::stack(pieces).reshape({count, padded_numel});
  }
  const at::Tensor all = at::zeros({count, padded_numel}, local.options());
  if (ordered) {
    all.view({-1}).narrow(0, 0, local.numel()).copy_(local.reshape({-1}));
    return all;
  }
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor piece = slice_part(local, transfer.held_part, parts[i]);
    all.select(0, i).narrow(0, 0, piece.numel()).view(piece.sizes()).copy_(piece);
  }
  return all;
}

PendingStep reduce_scatter(const at::Tensor& local, comm::Group& group, const RedistributeStep& step,
                           const std::shared_ptr<const TransferPlan>& transfer) {
  if (local.scalar_type() == at::kBool) {  // booleans are reduced as a whole, then sliced
    return then_finish(reduce(local, group, step), [transfer](const at::Tensor& value) {
      return slice_part(value, transfer->held_part, transfer->needed_part).clone(at::MemoryFormat::Contiguous);
    });
  }
  const ReductionEncoding encoding(step.partial);
  const int64_t padded_numel = largest_part_numel(transfer->parts_after);
  const at::Tensor input = pack_reduce_scatter_input(encoding.encode(local), *transfer, padded_numel);
  const at::Tensor output = at::empty({padded_numel}, local.options());
  comm::PendingCollective work = comm::reduce_scatter_into(group, output, input, encoding.op, "redistribute");
  PendingStep started =
      then_finish({output, std::move(work), {}, true}, [own = sizes_of(transfer->needed_part)](const at::Tensor& sums) {
        return sums.narrow(0, 0, c10::multiply_integers(own)).view(own);
      });
  return encoding.decode_after(std::move(started));
}

// Starts an all-to-all. This rank sends to each rank for which TransferPlan::exchanges_with is true the elements that
// this rank holds and the other rank needs, ordered by global index. The receiver computes the same intersection from
// the splits, so it knows the number and the positions of the elements without metadata.
PendingStep exchange(const at::Tensor& local, comm::Group& group, std::shared_ptr<const TransferPlan> transfer) {
  std::vector<at::Tensor> sent;
  std::vector<int64_t> sent_counts;
  std::vector<int64_t> received_counts;
  std::vector<ShardIndices> received;
  int64_t total = 0;
  for (size_t i = 0; i < transfer->parts_before.size(); ++i) {
    const bool linked = transfer->exchanges_with[i];
    if (linked) {
      const ShardIndices part = intersection(transfer->held_part, transfer->parts_after[i]);
      sent.push_back(slice_part(local, transfer->held_part, part).reshape({-1}));
    }
    sent_counts.push_back(linked ? sent.back().numel() : 0);
    received.push_back(linked ? intersection(transfer->parts_before[i], transfer->needed_part) : ShardIndices{});
    received_counts.push_back(linked ? numel_of(received.back()) : 0);
    total += received_counts.back();
  }
  const at::Tensor input = at::cat(sent);
  const at::Tensor output = at::empty({total}, local.options());
  comm::PendingCollective work =
      comm::all_to_all_single(group, output, input, received_counts, sent_counts, "redistribute");
  return then_finish({output, std::move(work), {}, true}, [transfer, received_counts,
                                                           received = std::move(received)](const at::Tensor& all) {
    const at::Tensor result = at::empty(sizes_of(transfer->needed_part), all.options());
    int64_t offset = 0;
    for (size_t i = 0; i < received.size(); ++i) {
      if (received_counts[i] > 0) {
        copy_part_into(result, transfer->needed_part,
                       all.narrow(0, offset, received_counts[i]).view(sizes_of(received[i])), received[i]);
        offset += received_counts[i];
      }
    }
    return result;
  });
}

// Returns this rank's values of the Partial placement `to`; their reduction over the mesh dim gives `local`. For a sum
// PyTorch divides `local` by the number of ranks, which rounds. Here the first rank keeps `local` and the others get
// zeros.
at::Tensor replicate_to_partial(const at::Tensor& local, const Placement& to, int64_t k, int64_t coordinate) {
  if (to.kind == Placement::Kind::kNormPartial) {
    if (to.norm_order() == 0) return local / static_cast<double>(k);
    return local / std::pow(static_cast<double>(k), 1.0 / to.norm_order());
  }
  switch (to.reduce_op) {
    case ReduceOp::kSum:  // no division, so no rounding
      return coordinate == 0 ? local : at::zeros_like(local);
    case ReduceOp::kProduct:
      return coordinate == 0 ? local : at::ones_like(local);
    default:
      return local;
  }
}

PendingStep start_step(const at::Tensor& tensor, const DeviceMesh& mesh, const RedistributeStep& step, bool may_alias) {
  const at::Tensor local = tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
  if (step.kind == RedistributeStep::Kind::kReplicateToPartial) {
    const int64_t dim = step.mesh_dims[0];
    return finished(replicate_to_partial(local, step.partial, mesh.shape()[dim], (*mesh.coordinate())[dim]));
  }
  const auto transfer = step.transfer ? step.transfer : plan_transfer(step, mesh);
  if (step.kind == RedistributeStep::Kind::kSliceLocal) {
    const at::Tensor part = slice_part(local, transfer->held_part, transfer->needed_part);
    return finished(may_alias ? part.contiguous() : part.clone(at::MemoryFormat::Contiguous));
  }
  comm::Group& group = step.mesh_dims.size() == 1
                           ? *mesh.group(step.mesh_dims[0])
                           : *mesh.group(std::vector<int64_t>(step.mesh_dims.begin(), step.mesh_dims.end()));
  switch (step.kind) {
    case RedistributeStep::Kind::kAllReduce:
      return reduce(local, group, step);
    case RedistributeStep::Kind::kReduceScatter:
      return reduce_scatter(local, group, step, transfer);
    case RedistributeStep::Kind::kAllGather:
      return gather(local, group, transfer);
    default:
      return exchange(local, group, transfer);
  }
}

}  // namespace

// Waits for the collective `work`. The first call of wait_and_finish() then runs `finish` if it is set; later calls
// return the stored `value`.
at::Tensor PendingStep::wait_and_finish() {
  work.wait();
  pending = false;
  if (finish) value = std::exchange(finish, {})();
  return value;
}

// Each step before the last collective is completed before the next step starts. The last collective is only started.
// The local steps after it become part of `finish`, which holds a reference to the mesh, because the mesh owns the
// process group.
PendingStep start_redistribute(const at::Tensor& local, const DeviceMesh& mesh, const RedistributeSteps& steps,
                               bool may_alias) {
  at::Tensor now = local;
  for (size_t i = 0; i < steps.size(); ++i) {
    PendingStep started = start_step(now, mesh, steps[i], may_alias || i > 0);
    const bool others_are_local = std::none_of(steps.begin() + static_cast<int64_t>(i) + 1, steps.end(), communicates);
    if (started.pending && others_are_local) {
      if (i + 1 == steps.size()) return started;
      const RedistributeSteps local_steps(steps.begin() + static_cast<int64_t>(i) + 1, steps.end());
      const auto owner = mesh.shared_from_this();
      return then_finish(std::move(started), [owner, local_steps](const at::Tensor& value) {
        return run_redistribute(value, *owner, local_steps, true);
      });
    }
    now = started.wait_and_finish();
  }
  return finished(now.is_same(local) && !may_alias ? local.clone() : now);
}

at::Tensor run_redistribute(const at::Tensor& local, const DeviceMesh& mesh, const RedistributeSteps& steps,
                            bool may_alias) {
  return start_redistribute(local, mesh, steps, may_alias).wait_and_finish();
}

}  // namespace tessera
