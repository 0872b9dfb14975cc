#include "tessera/comm/collectives.h"

#include <ATen/ATen.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <exception>
#include <functional>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/observer.h"
#include "tessera/comm/peer_failed.h"

namespace tessera::comm {

struct Pending::State {
  Group* group = nullptr;
  const char* verb = "";
  std::string subject;
  uint64_t sequence = 0;
  c10::intrusive_ptr<c10d::Backend> backend;  // outlives the work
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> buffers;  // kept alive until the work has ended
  std::function<void()> finish;     // runs on the waiting thread after the work
  int unwinding = std::uncaught_exceptions();
  std::string where;
};

namespace {

using State = Pending::State;

// libtorch's and Gloo's reasons carry a source position in front and a backtrace behind.
std::string plain_reason(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string reason = c10_error ? c10_error->what_without_backtrace() : error.what();
  reason = reason.substr(0, reason.find('\n'));
  reason = reason.substr(0, reason.find(". This is typically"));
  if (reason.starts_with('[')) {
    const size_t end = reason.find("] ");
    if (end != std::string::npos) reason.erase(0, end + 2);
  }
  while (!reason.empty() && (reason.back() == '.' || reason.back() == ' ')) reason.pop_back();
  return reason;
}

[[noreturn]] void fail(const State& state, const std::exception& error) {
  const std::string reason = plain_reason(error);
  if (reason.find("imed out") != std::string::npos) {
    raise(ErrorKind::kComm,
          "{}: {}. Some rank did not start this collective in time: look for the first error of the other ranks, or raise "
          "comm.timeout_seconds.",
          state.where, reason);
  }
  throw PeerFailed(fmt::format("{}: {}. A peer has ended or broken off: the first error of the other ranks says why.",
                               state.where, reason));
}

std::string place(const Group& group, const char* verb, std::string_view subject) {
  return fmt::format("[comm.{}] {}{}group '{}' (rank {} of {})", verb, subject, subject.empty() ? "" : ", ", group.name(),
                     group.rank(), group.size());
}

// The collective under construction: checks, then start().
class Launch {
 public:
  Launch(Group& group, const char* verb, std::string_view subject) : group_(group), state_(std::make_unique<State>()) {
    state_->sequence = group.next_sequence();
    state_->where = fmt::format("{}, call {}", place(group, verb, subject), state_->sequence);
  }

  void require(bool condition, const std::string& what) const {
    TESSERA_CHECK(condition, ErrorKind::kShape, "{}: {}", state_->where, what);
  }
  void require_plain(const at::Tensor& tensor, const char* name) const {
    require(tensor.defined(), fmt::format("{} is undefined", name));
    require(tensor.is_contiguous(), fmt::format("{} {} is not contiguous. Pass .contiguous().", name, tensor.sizes()));
  }
  void require_same_dtype(const at::Tensor& output, const at::Tensor& input) const {
    require(output.scalar_type() == input.scalar_type(),
            fmt::format("output is {}, input {}", c10::toString(output.scalar_type()), c10::toString(input.scalar_type())));
  }
  void require_position(int position, const char* name) const {
    require(position >= 0 && position < group_.size(), fmt::format("{} {} is not in the group", name, position));
  }

  // Without its own version counter a tensor would be bumped from the back-end's threads.
  at::Tensor keep(const at::Tensor& tensor) {
    at::Tensor alias = tensor.variable_data();
    state_->buffers.push_back(alias);
    return alias;
  }
  at::Tensor keep_output(const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    return keep(tensor);
  }

  // What observers are told at the start.
  void count(CommKind kind, int64_t bytes) {
    kind_ = kind;
    bytes_ = bytes;
  }
  void on_finish(std::function<void()> finish) { state_->finish = std::move(finish); }

  // begin(backend) returns the work; it may be empty when there is nothing to carry.
  template <class Begin>
  Pending start(const Begin& begin) {
    if (kind_ != CommKind::kCount) CollectiveObserver::notify(kind_, bytes_, group_);
    try {
      state_->backend = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&group_.backend());
      state_->work = begin(*state_->backend);
    } catch (const std::exception& error) {
      fail(*state_, error);
    }
    return Pending(std::move(state_));
  }
  Pending finished() {
    if (state_->finish) state_->finish();
    return Pending();
  }

 private:
  Group& group_;
  std::unique_ptr<State> state_;
  CommKind kind_ = CommKind::kCount;
  int64_t bytes_ = 0;
};

int64_t size_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Data that is only moved travels as bytes, so that every dtype does.
at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

c10d::ReduceOp::RedOpType carried_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return c10d::ReduceOp::SUM;  // the division follows
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
  }
  raise(ErrorKind::kInternal, "[comm] unknown reduction");
}

void require_reducible(const Launch& launch, at::ScalarType type, ReduceOp op) {
  const bool floating = type == at::kFloat || type == at::kDouble || is_half(type);
  const bool integer = type == at::kByte || type == at::kChar || type == at::kInt || type == at::kLong;
  launch.require(floating || (integer && op != ReduceOp::kAvg),
                 fmt::format("cannot reduce {} by {}. Wanted float32, float64, bfloat16, float16{}.", c10::toString(type),
                             to_string(op), op == ReduceOp::kAvg ? "" : ", int32, int64, int8 or uint8"));
}

void accumulate(const at::Tensor& into, const at::Tensor& part, ReduceOp op) {
  at::Tensor sum = into;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: sum.add_(part); break;
    case ReduceOp::kMin: at::minimum_out(sum, into, part.to(into.scalar_type())); break;
    case ReduceOp::kMax: at::maximum_out(sum, into, part.to(into.scalar_type())); break;
    case ReduceOp::kProduct: sum.mul_(part); break;
  }
}

// output = parts[0] op parts[1] op ..., in this order, in pieces that stay in the cache.
void reduce_parts(const at::Tensor& output, const at::Tensor& parts, ReduceOp op) {
  constexpr int64_t kPiece = 1 << 17;
  const int64_t count = parts.size(0), length = parts.size(1);
  const bool through_float = is_half(output.scalar_type());
  at::Tensor sum;
  if (through_float) sum = at::empty({std::min(length, kPiece)}, output.options().dtype(at::kFloat));
  for (int64_t begin = 0; begin < length; begin += kPiece) {
    const int64_t size = std::min(kPiece, length - begin);
    at::Tensor target = output.narrow(0, begin, size);
    at::Tensor piece = through_float ? sum.narrow(0, 0, size) : target;
    piece.copy_(parts[0].narrow(0, begin, size));
    for (int64_t i = 1; i < count; ++i) accumulate(piece, parts[i].narrow(0, begin, size), op);
    if (op == ReduceOp::kAvg) piece.div_(static_cast<double>(count));
    if (through_float) target.copy_(piece);
  }
}

// Fresh large memory costs far more than the copy into it, so the group keeps one buffer.
at::Tensor take_scratch(Group& group, int64_t bytes, at::Device device) {
  at::Tensor kept(std::exchange(group.scratch(), at::TensorBase()));
  if (!kept.defined() || kept.numel() < bytes || kept.device() != device) {
    kept = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  return kept;
}

}  // namespace

const char* to_string(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kAvg: return "avg";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kProduct: return "product";
  }
  return "?";
}

Pending::Pending() = default;
Pending::Pending(std::unique_ptr<State> state) : state_(std::move(state)) {}
Pending::Pending(Pending&&) noexcept = default;

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this != &other) {
    { Pending ended(std::move(*this)); }
    state_ = std::move(other.state_);
  }
  return *this;
}

Pending::~Pending() {
  if (!state_) return;
  const bool unwinding = std::uncaught_exceptions() > state_->unwinding;
  if (unwinding) {
    try {
      state_->backend->abort();
    } catch (...) {  // the connections were gone already
    }
  }
  try {
    wait();
  } catch (const std::exception& error) {
    if (!unwinding) log_warning("{}", error.what());
  }
}

void Pending::wait() {
  if (!state_) return;
  const auto state = std::move(state_);
  if (state->work) {
    try {
      TESSERA_CHECK(state->work->wait(), ErrorKind::kComm, "broken off");
    } catch (const std::exception& error) {
      fail(*state, error);
    }
  }
  if (state->finish) state->finish();
}

bool Pending::done() const { return !state_ || !state_->work || state_->work->isCompleted(); }

Pending all_reduce(Group& group, const at::Tensor& tensor, ReduceOp op, std::string_view subject) {
  Launch launch(group, "all_reduce", subject);
  launch.require_plain(tensor, "tensor");
  require_reducible(launch, tensor.scalar_type(), op);
  if (group.size() == 1 || tensor.numel() == 0) return Pending();
  at::Tensor target = launch.keep_output(tensor).view({-1});
  at::Tensor carried = is_half(target.scalar_type()) ? target.to(at::kFloat) : target;
  if (op == ReduceOp::kAvg || !carried.is_same(target)) {
    launch.on_finish([target, carried, op, size = group.size()]() mutable {
      if (op == ReduceOp::kAvg) carried.div_(size);
      if (!carried.is_same(target)) target.copy_(carried);
    });
  }
  launch.count(CommKind::kAllReduce, 2 * size_of(tensor) * (group.size() - 1) / group.size());
  return launch.start([&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors = {carried};
    c10d::AllreduceOptions options;
    options.reduceOp = carried_op(op);
    return backend.allreduce(tensors, options);
  });
}

Pending all_gather_into(Group& group, const at::Tensor& output, const at::Tensor& input, std::string_view subject) {
  Launch launch(group, "all_gather", subject);
  launch.require_plain(output, "output");
  launch.require_plain(input, "input");
  launch.require_same_dtype(output, input);
  launch.require(output.numel() == input.numel() * group.size(),
                 fmt::format("output {} holds {} elements, wanted {} times input's {}", output.sizes(), output.numel(),
                             group.size(), input.numel()));
  if (input.numel() == 0) return Pending();
  at::Tensor out = bytes_of(launch.keep_output(output)), in = bytes_of(launch.keep(input));
  if (group.size() == 1) {
    if (out.data_ptr() != in.data_ptr()) out.copy_(in);
    return launch.finished();
  }
  launch.count(CommKind::kAllGather, size_of(input) * (group.size() - 1));
  return launch.start([&](c10d::Backend& backend) { return backend._allgather_base(out, in); });
}

// Each rank sends every other rank its part and adds what it receives itself: half the traffic of Gloo's
// all-reduce, a fixed order of additions, and half precision travels as it is yet is summed in float32.
Pending reduce_scatter_into(Group& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                            std::string_view subject) {
  Launch launch(group, "reduce_scatter", subject);
  launch.require_plain(output, "output");
  launch.require_plain(input, "input");
  launch.require_same_dtype(output, input);
  launch.require(input.numel() == output.numel() * group.size(),
                 fmt::format("input {} holds {} elements, wanted {} times output's {}", input.sizes(), input.numel(),
                             group.size(), output.numel()));
  require_reducible(launch, input.scalar_type(), op);
  if (input.numel() == 0) return Pending();
  at::Tensor out = launch.keep_output(output).view({-1}), in = bytes_of(launch.keep(input));
  if (group.size() == 1) {
    if (output.data_ptr() != input.data_ptr()) out.copy_(input.view({-1}));
    return launch.finished();
  }
  at::Tensor scratch = take_scratch(group, in.numel(), input.device());
  at::Tensor received = scratch.narrow(0, 0, in.numel());
  launch.on_finish([&group, scratch, received, out, op] {
    reduce_parts(out, received.view(out.scalar_type()).view({group.size(), out.numel()}), op);
    if (!group.scratch().defined() || group.scratch().numel() < scratch.numel()) group.scratch() = scratch;
  });
  launch.count(CommKind::kReduceScatter, size_of(output) * (group.size() - 1));
  return launch.start([&](c10d::Backend& backend) {
    std::vector<int64_t> equal_out, equal_in;
    return backend.alltoall_base(received, in, equal_out, equal_in);
  });
}

Pending broadcast(Group& group, const at::Tensor& tensor, int root, std::string_view subject) {
  Launch launch(group, "broadcast", subject);
  launch.require_plain(tensor, "tensor");
  launch.require_position(root, "root");
  if (group.size() == 1 || tensor.numel() == 0) return Pending();
  std::vector<at::Tensor> tensors = {bytes_of(launch.keep_output(tensor))};
  launch.count(CommKind::kBroadcast, size_of(tensor));
  return launch.start([&](c10d::Backend& backend) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return backend.broadcast(tensors, options);
  });
}

Pending scatter(Group& group, const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                std::string_view subject) {
  Launch launch(group, "scatter", subject);
  launch.require_plain(output, "output");
  launch.require_position(root, "root");
  std::vector<std::vector<at::Tensor>> sent;
  if (group.rank() == root) {
    launch.require(inputs.size() == static_cast<size_t>(group.size()),
                   fmt::format("{} inputs, wanted one per rank", inputs.size()));
    sent.emplace_back();
    for (const at::Tensor& input : inputs) {
      launch.require_plain(input, "input");
      launch.require_same_dtype(output, input);
      launch.require(input.numel() == output.numel(),
                     fmt::format("input {} differs in size from output {}", input.sizes(), output.sizes()));
      sent[0].push_back(bytes_of(launch.keep(input)));
    }
  }
  if (output.numel() == 0) return Pending();
  std::vector<at::Tensor> outputs = {bytes_of(launch.keep_output(output))};
  if (group.size() == 1) {
    outputs[0].copy_(sent[0][0]);
    return launch.finished();
  }
  launch.count(CommKind::kScatter, size_of(output));
  return launch.start([&](c10d::Backend& backend) {
    c10d::ScatterOptions options;
    options.rootRank = root;
    return backend.scatter(outputs, sent, options);
  });
}

Pending all_to_all_single(Group& group, const at::Tensor& output, const at::Tensor& input,
                          const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                          std::string_view subject) {
  Launch launch(group, "all_to_all", subject);
  launch.require_plain(output, "output");
  launch.require_plain(input, "input");
  launch.require_same_dtype(output, input);
  launch.require(output.dim() > 0 && input.dim() > 0 && output.sizes().slice(1) == input.sizes().slice(1),
                 fmt::format("output {} and input {} differ beyond dim 0", output.sizes(), input.sizes()));
  const auto byte_counts = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* name) {
    const int64_t rows = tensor.size(0), size = group.size();
    int64_t row_bytes = tensor.element_size();
    for (const int64_t extent : tensor.sizes().slice(1)) row_bytes *= extent;
    launch.require(!splits.empty() || rows % size == 0,
                   fmt::format("{} {} does not divide into {} equal parts. Give the splits.", name, tensor.sizes(), size));
    std::vector<int64_t> counts = splits.empty() ? std::vector<int64_t>(size, rows / size) : splits;
    launch.require(counts.size() == static_cast<size_t>(size) &&
                       std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count >= 0; }) &&
                       std::accumulate(counts.begin(), counts.end(), int64_t{0}) == rows,
                   fmt::format("{} splits {} do not add up to the {} rows of {}", name, counts, rows, tensor.sizes()));
    for (int64_t& count : counts) count *= row_bytes;
    return counts;
  };
  std::vector<int64_t> out_bytes = byte_counts(output, output_splits, "output");
  std::vector<int64_t> in_bytes = byte_counts(input, input_splits, "input");
  at::Tensor out = bytes_of(launch.keep_output(output)), in = bytes_of(launch.keep(input));
  if (group.size() == 1) {
    launch.require(out_bytes == in_bytes, fmt::format("output {} and input {} differ", output.sizes(), input.sizes()));
    out.copy_(in);
    return launch.finished();
  }
  launch.count(CommKind::kAllToAll, size_of(output) - out_bytes[group.rank()]);
  return launch.start([&](c10d::Backend& backend) { return backend.alltoall_base(out, in, out_bytes, in_bytes); });
}

Pending send(Group& group, const at::Tensor& tensor, int destination, int tag) {
  Launch launch(group, "send", fmt::format("to {}, tag {}", destination, tag));
  launch.require_plain(tensor, "tensor");
  launch.require_position(destination, "destination");
  launch.require(destination != group.rank(), "a rank cannot send to itself");
  if (tensor.numel() == 0) return Pending();
  std::vector<at::Tensor> tensors = {bytes_of(launch.keep(tensor))};
  launch.count(CommKind::kSend, 0);
  return launch.start([&](c10d::Backend& backend) { return backend.send(tensors, destination, tag); });
}

Pending recv(Group& group, const at::Tensor& tensor, int source, int tag) {
  Launch launch(group, "recv", fmt::format("from {}, tag {}", source, tag));
  launch.require_plain(tensor, "tensor");
  launch.require_position(source, "source");
  launch.require(source != group.rank(), "a rank cannot receive from itself");
  if (tensor.numel() == 0) return Pending();
  std::vector<at::Tensor> tensors = {bytes_of(launch.keep_output(tensor))};
  launch.count(CommKind::kRecv, size_of(tensor));
  return launch.start([&](c10d::Backend& backend) { return backend.recv(tensors, source, tag); });
}

void barrier(Group& group) {
  if (group.size() == 1) return;
  Launch launch(group, "barrier", "");
  launch.start([](c10d::Backend& backend) { return backend.barrier(); }).wait();
}

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
