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
#include "tessera/comm/monitor.h"
#include "tessera/comm/observer.h"
#include "tessera/comm/peer_failed.h"
#include "tessera/comm/signature.h"
#include "tessera/comm/signature_exchange.h"

namespace tessera::comm {

struct Pending::State {
  Signature signature;
  int rank = 0, size = 1;  // of the group
  std::shared_ptr<Monitor> monitor;
  uint64_t ticket = 0;                        // the monitor's
  c10::intrusive_ptr<c10d::Backend> backend;  // outlives the work
  c10::intrusive_ptr<c10d::Work> work;
  std::function<c10::intrusive_ptr<c10d::Work>()> begin;  // what wait() has to start first
  std::vector<at::Tensor> buffers;  // kept alive until the work has ended
  std::function<void()> finish;     // runs on the waiting thread after the work
  int unwinding = std::uncaught_exceptions();
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

std::string place(std::string_view verb, std::string_view group, int rank, int size, std::string_view subject, uint64_t sequence) {
  return fmt::format("[comm.{}] {}{}group '{}' (rank {} of {}), call {}", verb, subject, subject.empty() ? "" : ", ", group, rank,
                     size, sequence);
}

std::string where(const State& state) {
  const Signature& call = state.signature;
  std::string subject = call.subject;
  if (is_message(call.op)) subject = fmt::format("{} {}, tag {}", call.op == Op::kSend ? "to" : "from", call.root, call.tag);
  return place(to_string(call.op), call.group, state.rank, state.size, subject, call.sequence);
}

// What a call that ended badly throws: the verdict of all ranks when there is one, else what this rank saw.
[[noreturn]] void fail(const State& state, const std::exception& error) {
  const auto* own = dynamic_cast<const Error*>(&error);
  const std::string reason = own ? own->what() : plain_reason(error);
  if (dynamic_cast<const Disagreement*>(&error)) {
    if (state.monitor) state.monitor->fail_with(state.ticket, reason);
    throw Disagreement(reason);
  }
  if (own && own->kind() != ErrorKind::kComm) {  // the call does not fit its back-end, or the ranks do not fit together
    throw Error(own->kind(), reason.starts_with('[') ? reason : fmt::format("{}: {}", where(state), reason));
  }
  const bool timed_out = reason.find("imed out") != std::string::npos;
  std::optional<Verdict> verdict;
  if (state.monitor) {
    const std::string seen = timed_out ? fmt::format("timed out after {} s", state.monitor->options().timeout.count() / 1000)
                                       : fmt::format("{}: {}", where(state), reason);
    verdict = state.monitor->fail(state.ticket, {.group = state.signature.members,
                                                 .sequence = state.signature.sequence,
                                                 .text = seen,
                                                 .timed_out = timed_out});
  }
  if (verdict) {
    const std::string message = fmt::format("{}: {}{}.", where(state), timed_out ? "timed out. " : "", verdict->text);
    if (verdict->consequence) throw PeerFailed(message);
    throw Error(ErrorKind::kComm, message);
  }
  if (timed_out) {
    raise(ErrorKind::kComm,
          "{}: {}. Some rank did not start this collective in time: look for the first error of the other ranks, or raise "
          "comm.timeout_seconds.",
          where(state), reason);
  }
  throw PeerFailed(fmt::format("{}: {}. A peer has ended or broken off: the first error of the other ranks says why.",
                               where(state), reason));
}

// The collective under construction: checks, then sign(), then start() or finished().
class Launch {
 public:
  Launch(Group& group, Op op, std::string_view subject)
      : group_(group), op_(op), subject_(subject), state_(std::make_unique<State>()) {}

  void require(bool condition, const std::string& what) const {
    TESSERA_CHECK(condition, ErrorKind::kShape, "{}: {}",
                  place(to_string(op_), group_.name(), group_.rank(), group_.size(), subject_, group_.sequence() + 1), what);
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
    device_ = tensor.device().type();
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

  // All checks are passed: the call counts. `tensor`: whose size and dtype must agree on all ranks.
  struct Terms {
    c10::IntArrayRef sizes = {};
    int dtype = -1;
    ReduceOp reduce = ReduceOp::kSum;
    int root = -1;
    int tag = 0;
  };
  void sign(const Terms& terms) {
    if (group_.size() == 1) return;
    uint64_t sequence = 0;
    if (is_message(op_)) {
      const bool sends = op_ == Op::kSend;
      sequence = group_.next_message(sends ? group_.rank() : terms.root, sends ? terms.root : group_.rank(), terms.tag);
    } else {
      sequence = group_.next_sequence();
    }
    state_->signature = comm::sign({.group = group_.name(),
                                    .members = group_.context().id,
                                    .sequence = sequence,
                                    .op = op_,
                                    .reduce = terms.reduce,
                                    .dtype = terms.dtype,
                                    .sizes = terms.sizes,
                                    .root = terms.root,
                                    .tag = terms.tag,
                                    .rank = group_.rank(),
                                    .subject = subject_});
    state_->rank = group_.rank();
    state_->size = group_.size();
    state_->monitor = group_.context().monitor;
    if (state_->monitor) state_->ticket = state_->monitor->start(state_->signature);
  }

  // begin(backend) returns the work; it may be empty when there is nothing to carry.
  template <class Begin>
  Pending start(Begin begin) {
    if (kind_ != CommKind::kCount) CollectiveObserver::notify(kind_, bytes_, group_);
    try {
      state_->backend = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&group_.backend(device_));
      const bool compares_itself = state_->backend.get() == &group_.backend() && group_.comparing_backend();
      if (compares_itself) {
        group_.comparing_backend()->announce(state_->signature);
      } else if (compares_first()) {
        if (op_ == Op::kRecv) {  // the sender's signature may be long in coming
          state_->begin = [&group = group_, signature = state_->signature, backend = state_->backend, begin]() mutable {
            await_announced_message(group, signature);
            return begin(*backend);
          };
          return Pending(std::move(state_));
        }
        compare();
      }
      state_->work = begin(*state_->backend);
    } catch (const std::exception& error) {
      fail(*state_, error);
    }
    if (state_->monitor && state_->work) state_->monitor->carry(state_->ticket, state_->signature, state_->work);
    return Pending(std::move(state_));
  }
  // There is nothing to move.
  Pending finished() {
    if (group_.size() > 1 && !group_.comparing_backend() && compares_first() && op_ != Op::kRecv) {
      try {
        compare();
      } catch (const std::exception& error) {
        fail(*state_, error);
      }
    }
    if (state_->monitor) state_->monitor->finish(state_->ticket);
    if (state_->finish) state_->finish();
    return Pending();
  }

 private:
  bool compares_first() const { return state_->monitor && state_->monitor->options().check == CheckMode::kAlways; }
  void compare() {
    state_->monitor->wait(state_->ticket);
    if (op_ == Op::kSend) {
      announce_message(group_, state_->signature);
    } else {
      compare_signatures(group_, state_->signature);
    }
  }

  Group& group_;
  const Op op_;
  const std::string_view subject_;
  c10::DeviceType device_ = c10::DeviceType::CPU;  // of the tensors
  std::unique_ptr<State> state_;
  CommKind kind_ = CommKind::kCount;
  int64_t bytes_ = 0;
};

int64_t size_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Data that is only moved travels as bytes, so that every dtype does. One element may have any stride.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.view({-1}).as_strided({tensor.numel()}, {1}).view(at::kByte);
}

// Complex numbers add up part by part.
bool sums_by_parts(const at::Tensor& tensor, ReduceOp op) {
  return tensor.is_complex() && !tensor.is_conj() && (op == ReduceOp::kSum || op == ReduceOp::kAvg);
}

// Gloo neither divides nor adds half precision in float32; shared memory and the fake back-end do.
bool reduces_by_itself(const c10d::Backend& backend) {
  const auto name = backend.getBackendName();
  return name == "shm" || name == "fake";
}

int dtype_of(const at::Tensor& tensor) { return static_cast<int>(tensor.scalar_type()); }

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

c10d::ReduceOp::RedOpType carried_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg: return c10d::ReduceOp::AVG;
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
    if (state_->monitor) state_->monitor->give_up();
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
  try {
    if (state->monitor) state->monitor->wait(state->ticket);
    if (state->begin) state->work = state->begin();
    if (state->work) TESSERA_CHECK(state->work->wait(), ErrorKind::kComm, "broken off");
  } catch (const std::exception& error) {
    fail(*state, error);
  }
  if (state->monitor) state->monitor->finish(state->ticket);
  if (state->finish) state->finish();
}

bool Pending::done() const { return !state_ || (!state_->begin && (!state_->work || state_->work->isCompleted())); }

Pending all_reduce(Group& group, const at::Tensor& tensor, ReduceOp op, std::string_view subject) {
  if (sums_by_parts(tensor, op)) return all_reduce(group, at::view_as_real(tensor), op, subject);
  Launch launch(group, Op::kAllReduce, subject);
  launch.require_plain(tensor, "tensor");
  require_reducible(launch, tensor.scalar_type(), op);
  launch.sign({.sizes = tensor.sizes(), .dtype = dtype_of(tensor), .reduce = op});
  if (group.size() == 1 || tensor.numel() == 0) return launch.finished();
  at::Tensor target = launch.keep_output(tensor).view({-1});
  c10d::AllreduceOptions options;
  options.reduceOp = carried_op(op);
  at::Tensor carried = target;
  if (!reduces_by_itself(group.backend())) {
    if (is_half(target.scalar_type())) carried = target.to(at::kFloat);
    if (op == ReduceOp::kAvg) options.reduceOp = c10d::ReduceOp::SUM;
    launch.on_finish([target, carried, op, size = group.size()]() mutable {
      if (op == ReduceOp::kAvg) carried.div_(size);
      if (!carried.is_same(target)) target.copy_(carried);
    });
  }
  launch.count(CommKind::kAllReduce, 2 * size_of(tensor) * (group.size() - 1) / group.size());
  return launch.start([&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors = {carried};
    return backend.allreduce(tensors, options);
  });
}

Pending all_gather_into(Group& group, const at::Tensor& output, const at::Tensor& input, std::string_view subject) {
  Launch launch(group, Op::kAllGather, subject);
  launch.require_plain(output, "output");
  launch.require_plain(input, "input");
  launch.require_same_dtype(output, input);
  launch.require(output.numel() == input.numel() * group.size(),
                 fmt::format("output {} holds {} elements, wanted {} times input's {}", output.sizes(), output.numel(),
                             group.size(), input.numel()));
  launch.sign({.sizes = input.sizes(), .dtype = dtype_of(input)});
  if (input.numel() == 0) return launch.finished();
  at::Tensor out = bytes_of(launch.keep_output(output)), in = bytes_of(launch.keep(input));
  if (group.size() == 1) {
    if (out.data_ptr() != in.data_ptr()) out.copy_(in);
    return launch.finished();
  }
  launch.count(CommKind::kAllGather, size_of(input) * (group.size() - 1));
  return launch.start([&](c10d::Backend& backend) { return backend._allgather_base(out, in); });
}

// Over Gloo each rank sends every other rank its part and adds what it receives itself: half the traffic of Gloo's
// all-reduce, a fixed order of additions, and half precision travels as it is yet is summed in float32.
Pending reduce_scatter_into(Group& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                            std::string_view subject) {
  if (sums_by_parts(input, op) && output.is_complex()) {
    return reduce_scatter_into(group, at::view_as_real(output), at::view_as_real(input), op, subject);
  }
  Launch launch(group, Op::kReduceScatter, subject);
  launch.require_plain(output, "output");
  launch.require_plain(input, "input");
  launch.require_same_dtype(output, input);
  launch.require(input.numel() == output.numel() * group.size(),
                 fmt::format("input {} holds {} elements, wanted {} times output's {}", input.sizes(), input.numel(),
                             group.size(), output.numel()));
  require_reducible(launch, input.scalar_type(), op);
  launch.sign({.sizes = output.sizes(), .dtype = dtype_of(input), .reduce = op});
  if (input.numel() == 0) return launch.finished();
  at::Tensor out = launch.keep_output(output).view({-1}), in = bytes_of(launch.keep(input));
  if (group.size() == 1) {
    if (output.data_ptr() != input.data_ptr()) out.copy_(input.view({-1}));
    return launch.finished();
  }
  launch.count(CommKind::kReduceScatter, size_of(output) * (group.size() - 1));
  if (reduces_by_itself(group.backend())) {
    return launch.start([&](c10d::Backend& backend) {
      at::Tensor parts = input.variable_data().view({-1});
      c10d::ReduceScatterOptions options;
      options.reduceOp = carried_op(op);
      return backend._reduce_scatter_base(out, parts, options);
    });
  }
  at::Tensor scratch = take_scratch(group, in.numel(), input.device());
  at::Tensor received = scratch.narrow(0, 0, in.numel());
  launch.on_finish([&group, scratch, received, out, op] {
    reduce_parts(out, received.view(out.scalar_type()).view({group.size(), out.numel()}), op);
    if (!group.scratch().defined() || group.scratch().numel() < scratch.numel()) group.scratch() = scratch;
  });
  return launch.start([&](c10d::Backend& backend) {
    std::vector<int64_t> equal_out, equal_in;
    return backend.alltoall_base(received, in, equal_out, equal_in);
  });
}

Pending broadcast(Group& group, const at::Tensor& tensor, int root, std::string_view subject) {
  Launch launch(group, Op::kBroadcast, subject);
  launch.require_plain(tensor, "tensor");
  launch.require_position(root, "root");
  launch.sign({.sizes = tensor.sizes(), .dtype = dtype_of(tensor), .root = root});
  if (group.size() == 1 || tensor.numel() == 0) return launch.finished();
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
  Launch launch(group, Op::kScatter, subject);
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
  launch.sign({.sizes = output.sizes(), .dtype = dtype_of(output), .root = root});
  if (output.numel() == 0) return launch.finished();
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
  Launch launch(group, Op::kAllToAll, subject);
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
  launch.sign({.sizes = input.sizes().slice(1), .dtype = dtype_of(input)});
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
  Launch launch(group, Op::kSend, "");
  launch.require_plain(tensor, "tensor");
  launch.require_position(destination, "destination");
  launch.require(destination != group.rank(), "a rank cannot send to itself");
  launch.sign({.sizes = tensor.sizes(), .dtype = dtype_of(tensor), .root = destination, .tag = tag});
  if (tensor.numel() == 0) return launch.finished();
  std::vector<at::Tensor> tensors = {bytes_of(launch.keep(tensor))};
  launch.count(CommKind::kSend, 0);
  return launch.start([&](c10d::Backend& backend) { return backend.send(tensors, destination, tag); });
}

Pending recv(Group& group, const at::Tensor& tensor, int source, int tag) {
  Launch launch(group, Op::kRecv, "");
  launch.require_plain(tensor, "tensor");
  launch.require_position(source, "source");
  launch.require(source != group.rank(), "a rank cannot receive from itself");
  launch.sign({.sizes = tensor.sizes(), .dtype = dtype_of(tensor), .root = source, .tag = tag});
  if (tensor.numel() == 0) return launch.finished();
  std::vector<at::Tensor> tensors = {bytes_of(launch.keep_output(tensor))};
  launch.count(CommKind::kRecv, size_of(tensor));
  return launch.start([tensors, source, tag](c10d::Backend& backend) mutable { return backend.recv(tensors, source, tag); });
}

void barrier(Group& group) {
  if (group.size() == 1) return;
  Launch launch(group, Op::kBarrier, "");
  launch.sign({});
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
