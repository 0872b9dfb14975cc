#include "tessera/comm/collectives/collectives.h"

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/backends/local_reduction.h"
#include "tessera/comm/collectives/collective_start.h"
#include "tessera/comm/group/capabilities.h"

namespace tessera::comm {
namespace {

int64_t size_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Collectives that only move data pass it to the back-end as bytes, so that they work for every dtype. as_strided is
// needed because a contiguous tensor of one element may have any stride, which view(kByte) refuses.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.view({-1}).as_strided({tensor.numel()}, {1}).view(at::kByte);
}

int dtype_of(const at::Tensor& tensor) { return static_cast<int>(tensor.scalar_type()); }

void require_reducible(const CollectiveStart& call, at::ScalarType type, ReduceOp op) {
  call.require(can_reduce(type, op), fmt::format("cannot reduce {} by {}. Wanted {}.", c10::toString(type),
                                                 to_string(op), reducible_types(op)));
}

// Replaces an average by a sum, for back-ends that cannot average; divide_and_round() divides afterwards.
c10d::ReduceOp::RedOpType sum_for_average(ReduceOp op) {
  return to_c10d_op(op == ReduceOp::kAvg ? ReduceOp::kSum : op);
}

// Once the work has ended: divides the back-end's result `carried` for averages and copies it to `target`. For half
// precision `carried` is a float32 tensor, so the result is rounded once; otherwise `carried` is `target` itself.
void divide_and_round(CollectiveStart& call, const at::Tensor& target, const at::Tensor& carried, ReduceOp op,
                      int size) {
  call.on_finish([target, carried, op, size]() mutable {
    if (op == ReduceOp::kAvg) carried.div_(size);
    if (!carried.is_same(target)) target.copy_(carried);
  });
}

// Takes the group's scratch buffer, or allocates a larger one. The buffer is kept between calls because the page faults
// of fresh memory cost far more than the copy into it.
at::Tensor take_scratch(at::TensorBase& kept_by_group, int64_t bytes, at::Device device) {
  at::Tensor kept(std::exchange(kept_by_group, at::TensorBase()));
  if (!kept.defined() || kept.numel() < bytes || kept.device() != device) {
    kept = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  return kept;
}

}  // namespace

PendingCollective all_reduce(Group& group, const at::Tensor& tensor, ReduceOp op, std::string_view subject) {
  if (reduces_as_real(tensor, op)) return all_reduce(group, at::view_as_real(tensor), op, subject);
  CollectiveStart call(group, Op::kAllReduce, subject);
  call.require_plain(tensor, "tensor");
  require_reducible(call, tensor.scalar_type(), op);
  call.sign({.reduce = op, .dtype = dtype_of(tensor), .sizes = tensor.sizes()});
  if (group.size() == 1 || tensor.numel() == 0) return call.finished();
  at::Tensor target = call.keep_output(tensor).view({-1});
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d_op(op);
  at::Tensor carried = target;
  if (!capabilities_of(group.backend(tensor.device().type())).reduces) {
    if (is_half(target.scalar_type())) carried = target.to(at::kFloat);
    options.reduceOp = sum_for_average(op);
    divide_and_round(call, target, carried, op, group.size());
  }
  call.count(2 * size_of(tensor) * (group.size() - 1) / group.size());
  return call.start([&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors = {carried};
    return backend.allreduce(tensors, options);
  });
}

PendingCollective all_gather_into(Group& group, const at::Tensor& output, const at::Tensor& input,
                                  std::string_view subject) {
  CollectiveStart call(group, Op::kAllGather, subject);
  call.require_plain(output, "output");
  call.require_plain(input, "input");
  call.require_same_dtype(output, input);
  call.require(output.numel() == input.numel() * group.size(),
               fmt::format("output {} holds {} elements, wanted {} times input's {}", output.sizes(), output.numel(),
                           group.size(), input.numel()));
  call.sign({.dtype = dtype_of(input), .sizes = input.sizes()});
  if (input.numel() == 0) return call.finished();
  at::Tensor out = bytes_of(call.keep_output(output)), in = bytes_of(call.keep(input));
  if (group.size() == 1) {
    if (out.data_ptr() != in.data_ptr()) out.copy_(in);
    return call.finished();
  }
  call.count(size_of(input) * (group.size() - 1));
  return call.start([&](c10d::Backend& backend) { return backend._allgather_base(out, in); });
}

// The back-end's Capabilities choose one of three algorithms:
// - `reduces` (shared memory): one reduce-scatter of the back-end.
// - `scatters_sums` (NCCL, HierarchicalBackend): half precision is converted to float32 before the back-end's
//   reduce-scatter, and averages are divided after the sum.
// - Otherwise (Gloo): an all-to-all sends each rank its part, and the receiver adds the parts in rank order. This has
//   half the traffic of Gloo's all-reduce and a fixed order of additions; half precision is sent unconverted and summed
//   in float32.
PendingCollective reduce_scatter_into(Group& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                      std::string_view subject) {
  if (reduces_as_real(input, op) && output.is_complex()) {
    return reduce_scatter_into(group, at::view_as_real(output), at::view_as_real(input), op, subject);
  }
  CollectiveStart call(group, Op::kReduceScatter, subject);
  call.require_plain(output, "output");
  call.require_plain(input, "input");
  call.require_same_dtype(output, input);
  call.require(input.numel() == output.numel() * group.size(),
               fmt::format("input {} holds {} elements, wanted {} times output's {}", input.sizes(), input.numel(),
                           group.size(), output.numel()));
  require_reducible(call, input.scalar_type(), op);
  call.sign({.reduce = op, .dtype = dtype_of(input), .sizes = output.sizes()});
  if (input.numel() == 0) return call.finished();
  at::Tensor out = call.keep_output(output).view({-1}), in = bytes_of(call.keep(input));
  if (group.size() == 1) {
    if (output.data_ptr() != input.data_ptr()) out.copy_(input.view({-1}));
    return call.finished();
  }
  call.count(size_of(output) * (group.size() - 1));
  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d_op(op);
  const auto capabilities = capabilities_of(group.backend(input.device().type()));
  if (capabilities.reduces) {
    return call.start([&](c10d::Backend& backend) {
      at::Tensor parts = input.variable_data().view({-1});
      return backend._reduce_scatter_base(out, parts, options);
    });
  }
  if (capabilities.scatters_sums) {
    at::Tensor parts = input.variable_data().view({-1}), sum = out;
    if (is_half(out.scalar_type())) parts = parts.to(at::kFloat), sum = at::empty_like(out, at::kFloat);
    options.reduceOp = sum_for_average(op);
    divide_and_round(call, out, sum, op, group.size());
    return call.start([&](c10d::Backend& backend) { return backend._reduce_scatter_base(sum, parts, options); });
  }
  const auto kept = group.scratch();  // shared: the group may be destroyed before the call has ended
  at::Tensor scratch = take_scratch(*kept, in.numel(), input.device());
  at::Tensor received = scratch.narrow(0, 0, in.numel());
  call.on_finish([kept, size = group.size(), scratch, received, out, op] {
    reduce_parts(out, received.view(out.scalar_type()).view({size, out.numel()}), op);
    if (!kept->defined() || kept->numel() < scratch.numel()) *kept = scratch;
  });
  return call.start([&](c10d::Backend& backend) {
    std::vector<int64_t> equal_out, equal_in;
    return backend.alltoall_base(received, in, equal_out, equal_in);
  });
}

PendingCollective broadcast(Group& group, const at::Tensor& tensor, int root, std::string_view subject) {
  CollectiveStart call(group, Op::kBroadcast, subject);
  call.require_plain(tensor, "tensor");
  call.require_position(root, "root");
  call.sign({.dtype = dtype_of(tensor), .sizes = tensor.sizes(), .root = root});
  if (group.size() == 1 || tensor.numel() == 0) return call.finished();
  std::vector<at::Tensor> tensors = {bytes_of(call.keep_output(tensor))};
  call.count(size_of(tensor));
  return call.start([&](c10d::Backend& backend) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return backend.broadcast(tensors, options);
  });
}

PendingCollective scatter(Group& group, const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                          std::string_view subject) {
  CollectiveStart call(group, Op::kScatter, subject);
  call.require_plain(output, "output");
  call.require_position(root, "root");
  std::vector<std::vector<at::Tensor>> sent;
  if (group.rank() == root) {
    call.require(inputs.size() == static_cast<size_t>(group.size()),
                 fmt::format("{} inputs, wanted one per rank", inputs.size()));
    sent.emplace_back();
    for (const at::Tensor& input : inputs) {
      call.require_plain(input, "input");
      call.require_same_dtype(output, input);
      call.require(input.numel() == output.numel(),
                   fmt::format("input {} differs in size from output {}", input.sizes(), output.sizes()));
      sent[0].push_back(bytes_of(call.keep(input)));
    }
  }
  call.sign({.dtype = dtype_of(output), .sizes = output.sizes(), .root = root});
  if (output.numel() == 0) return call.finished();
  std::vector<at::Tensor> outputs = {bytes_of(call.keep_output(output))};
  if (group.size() == 1) {
    outputs[0].copy_(sent[0][0]);
    return call.finished();
  }
  call.count(size_of(output));
  return call.start([&](c10d::Backend& backend) {
    c10d::ScatterOptions options;
    options.rootRank = root;
    return backend.scatter(outputs, sent, options);
  });
}

PendingCollective all_to_all_single(Group& group, const at::Tensor& output, const at::Tensor& input,
                                    const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                    std::string_view subject) {
  CollectiveStart call(group, Op::kAllToAll, subject);
  call.require_plain(output, "output");
  call.require_plain(input, "input");
  call.require_same_dtype(output, input);
  call.require(
      output.dim() > 0 && input.dim() > 0 && output.sizes().slice(1) == input.sizes().slice(1),
      fmt::format("output {} and input {} must be equal in all dims but dim 0", output.sizes(), input.sizes()));
  const auto byte_counts = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* name) {
    const int64_t rows = tensor.size(0), size = group.size();
    int64_t row_bytes = tensor.element_size();
    for (const int64_t extent : tensor.sizes().slice(1)) row_bytes *= extent;
    call.require(
        !splits.empty() || rows % size == 0,
        fmt::format("{} {} does not divide into {} equal parts. Give the splits.", name, tensor.sizes(), size));
    std::vector<int64_t> counts = splits.empty() ? std::vector<int64_t>(size, rows / size) : splits;
    call.require(counts.size() == static_cast<size_t>(size) &&
                     std::ranges::all_of(counts, [](int64_t count) { return count >= 0; }) &&
                     std::accumulate(counts.begin(), counts.end(), int64_t{0}) == rows,
                 fmt::format("{} splits {} do not add up to the {} rows of {}", name, counts, rows, tensor.sizes()));
    for (int64_t& count : counts) count *= row_bytes;
    return counts;
  };
  std::vector<int64_t> out_bytes = byte_counts(output, output_splits, "output");
  std::vector<int64_t> in_bytes = byte_counts(input, input_splits, "input");
  // Ranks may have different numbers of rows, so only the shape of a row is compared.
  call.sign({.dtype = dtype_of(input), .sizes = input.sizes().slice(1)});
  at::Tensor out = bytes_of(call.keep_output(output)), in = bytes_of(call.keep(input));
  if (group.size() == 1) {
    call.require(out_bytes == in_bytes, fmt::format("output {} and input {} differ", output.sizes(), input.sizes()));
    out.copy_(in);
    return call.finished();
  }
  call.count(size_of(output) - out_bytes[group.rank()]);
  return call.start([&](c10d::Backend& backend) { return backend.alltoall_base(out, in, out_bytes, in_bytes); });
}

PendingCollective send(Group& group, const at::Tensor& tensor, int destination, int tag) {
  CollectiveStart call(group, Op::kSend, "");
  call.require_plain(tensor, "tensor");
  call.require_position(destination, "destination");
  call.require(destination != group.rank(), "a rank cannot send to itself");
  call.sign({.dtype = dtype_of(tensor), .sizes = tensor.sizes(), .root = destination, .tag = tag});
  if (tensor.numel() == 0) return call.finished();
  std::vector<at::Tensor> tensors = {bytes_of(call.keep(tensor))};
  call.count(0);
  return call.start([&](c10d::Backend& backend) { return backend.send(tensors, destination, tag); });
}

PendingCollective recv(Group& group, const at::Tensor& tensor, int source, int tag) {
  CollectiveStart call(group, Op::kRecv, "");
  call.require_plain(tensor, "tensor");
  call.require_position(source, "source");
  call.require(source != group.rank(), "a rank cannot receive from itself");
  call.sign({.dtype = dtype_of(tensor), .sizes = tensor.sizes(), .root = source, .tag = tag});
  if (tensor.numel() == 0) return call.finished();
  std::vector<at::Tensor> tensors = {bytes_of(call.keep_output(tensor))};
  call.count(size_of(tensor));
  return call.start(
      [tensors, source, tag](c10d::Backend& backend) mutable { return backend.recv(tensors, source, tag); });
}

void barrier(Group& group) { barrier(group, c10::DeviceType::CPU); }

void barrier(Group& group, c10::Device device) {
  if (group.size() == 1) return;
  CollectiveStart call(group, Op::kBarrier, "");
  if (!device.is_cpu()) call.keep(at::empty({0}, device));  // selects the back-end of the device
  call.sign({});
  call.start([](c10d::Backend& backend) { return backend.barrier(); }).wait();
}

// Gathers the lengths first, then the strings, padded with zeros to the longest.
std::vector<std::string> all_gather_bytes(Group& group, std::string_view bytes) {
  at::Tensor length = at::empty({1}, at::kLong), lengths = at::empty({group.size()}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(bytes.size());
  all_gather_into(group, lengths, length, "lengths of byte strings").wait();
  const int64_t* each = lengths.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(each, each + group.size());
  at::Tensor own = at::zeros({longest}, at::kByte), all = at::empty({group.size(), longest}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), own.mutable_data_ptr<uint8_t>());
  all_gather_into(group, all, own, "byte strings").wait();
  std::vector<std::string> result;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto* begin = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>()) + rank * longest;
    result.emplace_back(begin, static_cast<size_t>(each[rank]));
  }
  return result;
}

std::string broadcast_bytes(Group& group, std::string_view bytes, int root) {
  at::Tensor length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(bytes.size());
  broadcast(group, length, root, "length of a byte string").wait();
  at::Tensor data = at::empty({*length.const_data_ptr<int64_t>()}, at::kByte);
  if (group.rank() == root) std::copy(bytes.begin(), bytes.end(), data.mutable_data_ptr<uint8_t>());
  broadcast(group, data, root, "byte string").wait();
  return {reinterpret_cast<const char*>(data.const_data_ptr<uint8_t>()), static_cast<size_t>(data.numel())};
}

}  // namespace tessera::comm
