#include "tessera/comm/backends/fake_backend.h"

#include <ATen/ATen.h>

#include <cmath>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/group/capabilities.h"

namespace tessera::comm {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class CompletedWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

// Size in bytes of the tensor that the signature describes (Signature::dtype and elements).
double own_bytes(const Signature& call) {
  if (call.dtype < 0) return 0;
  return static_cast<double>(call.elements) *
         static_cast<double>(c10::elementSize(static_cast<c10::ScalarType>(call.dtype)));
}

// The cost of a call is computed from the signature that announce() has set before the call. Collectives that take
// several tensors or lists of tensors raise the error of c10d::Backend; comm::collectives does not use them.
class FakeBackend final : public c10d::Backend, public ComparesSignatures, public HasCapabilities {
 public:
  FakeBackend(int rank, int size, bool one_host, std::shared_ptr<FakeCostAccount> account)
      : Backend(rank, size), one_host_(one_host), account_(std::move(account)) {}

  Capabilities capabilities() const override { return {.reduces = true}; }
  const std::string getBackendName() const override { return "fake"; }
  void announce(const Signature& signature) override { call_ = signature; }
  void abort() override {}

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    for (at::Tensor& tensor : tensors) reduce_equal_inputs(tensor, options.reduceOp);
    return count();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    output.copy_(input.view({getSize(), -1})[getRank()].view_as(output));
    reduce_equal_inputs(output, options.reduceOp);
    return count();
  }
  WorkPtr broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override { return count(); }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    const at::NoGradGuard guard;
    output.view({getSize(), -1}).copy_(input.view({1, -1}).expand({getSize(), -1}));
    return count();
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    if (options.rootRank == getRank()) {
      outputs.at(0).copy_(inputs.at(0).at(static_cast<size_t>(getRank())));
    } else {
      outputs.at(0).zero_();
    }
    return count();
  }
  // For each peer, fills the rows of the output that would come from the peer with the rows of the input that this rank
  // sends to itself. If the latter are fewer, the remaining rows of the output are zeros.
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    const int64_t size = getSize(), rank = getRank();
    const auto part = [size](const at::Tensor& tensor, const std::vector<int64_t>& splits, int64_t index) {
      if (splits.empty()) return tensor.narrow(0, index * (tensor.size(0) / size), tensor.size(0) / size);
      int64_t begin = 0;
      for (int64_t i = 0; i < index; ++i) begin += splits[static_cast<size_t>(i)];
      return tensor.narrow(0, begin, splits[static_cast<size_t>(index)]);
    };
    const at::Tensor own = part(input, input_splits, rank);
    if (output_splits.empty()) {
      output.view({size, -1}).copy_(own.view({1, -1}).expand({size, -1}));
    } else {
      output.zero_();
      for (int64_t peer = 0; peer < size; ++peer) {
        at::Tensor target = part(output, output_splits, peer);
        const int64_t rows = std::min(target.size(0), own.size(0));
        target.narrow(0, 0, rows).copy_(own.narrow(0, 0, rows));
      }
    }
    return count();
  }
  WorkPtr send(std::vector<at::Tensor>&, int, int) override { return count(); }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int, int) override {
    for (at::Tensor& tensor : tensors) tensor.zero_();
    return count();
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return count(); }

 private:
  // Applies the reduction as if every rank had this tensor; minimum, maximum and average do not change the tensor.
  void reduce_equal_inputs(at::Tensor& tensor, const c10d::ReduceOp& op) const {
    const at::NoGradGuard guard;
    if (op == c10d::ReduceOp::SUM) tensor.mul_(getSize());
    if (op == c10d::ReduceOp::PRODUCT) tensor.pow_(getSize());
  }
  WorkPtr count() {
    account_->add(call_.op, modelled_cost(account_->model(), call_, getRank(), getSize(), one_host_));
    return c10::make_intrusive<CompletedWork>();
  }

  const bool one_host_;
  const std::shared_ptr<FakeCostAccount> account_;
  Signature call_;
};

}  // namespace

FakeCost& FakeCost::operator+=(const FakeCost& other) {
  calls += other.calls;
  bytes += other.bytes;
  microseconds += other.microseconds;
  return *this;
}

void FakeCostAccount::add(Op op, const FakeCost& cost) {
  const std::lock_guard lock(mutex_);
  costs_.at(static_cast<size_t>(op)) += cost;
}

FakeCost FakeCostAccount::of(Op op) const {
  const std::lock_guard lock(mutex_);
  return costs_.at(static_cast<size_t>(op));
}

FakeCost FakeCostAccount::total() const {
  const std::lock_guard lock(mutex_);
  FakeCost sum;
  for (const FakeCost& cost : costs_) sum += cost;
  return sum;
}

// The formula of PyTorch's cost model: base + steps * latency + bytes / bandwidth, with the steps of a ring algorithm
// (a tree for broadcast and reduce). The link between hosts is used when any two ranks are on different hosts.
FakeCost modelled_cost(const LinkModel& model, const Signature& call, int rank, int size, bool one_host) {
  constexpr double kBytesPerGigabyte = 1024.0 * 1024.0 * 1024.0;
  const double own = own_bytes(call), hops = size - 1;
  double steps = hops, bytes = 0, extra = 0;
  switch (call.op) {
    case Op::kAllGather:
    case Op::kReduceScatter:
      bytes = own * hops;
      break;  // `own` is one rank's part
    case Op::kAllReduce:
      steps = 2 * hops;
      bytes = own * 2 * hops / size;
      break;
    case Op::kAllToAll:
      bytes = own * hops / size;
      extra = 1.0;
      break;
    case Op::kBroadcast:  // a pipelined tree
    case Op::kReduce:
      steps = std::ceil(std::log2(size));
      bytes = own;
      break;
    case Op::kScatter:
    case Op::kGather:
      bytes = rank == call.root ? own * hops : own;
      break;
    case Op::kSend:
    case Op::kRecv:
      steps = 1;
      bytes = own;
      break;
    case Op::kBarrier:
      steps = 2 * hops;
      break;
    case Op::kNone:
      break;
  }
  const double latency = one_host ? model.latency_us : model.remote_latency_us;
  const double bandwidth = model.gigabytes_per_second * (one_host ? 1.0 : model.remote_share);
  return {.calls = 1,
          .bytes = static_cast<uint64_t>(std::llround(bytes)),
          .microseconds = model.base_us + steps * latency + bytes / kBytesPerGigabyte / bandwidth * 1e6 + extra};
}

c10::intrusive_ptr<c10d::Backend> make_fake_backend(int rank, int size, bool one_host,
                                                    std::shared_ptr<FakeCostAccount> account) {
  return c10::make_intrusive<FakeBackend>(rank, size, one_host, std::move(account));
}

}  // namespace tessera::comm
