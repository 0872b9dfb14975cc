// The collectives of the pretend devices. Each collective runs on a stream of its group, is staged through the host,
// and uses the back-end of the group's CPU tensors. After wait() the result exists and is ordered before the caller's
// stream.
#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/group/capabilities.h"
#include "tests/support/pretend_device/memory.h"
#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Staged {
  at::Tensor device, host;
};

class StagedWork final : public c10d::Work {
 public:
  StagedWork(WorkPtr inner, c10::DeviceIndex device, const Moment& end, std::vector<Staged> outputs, Tensors inputs)
      : inner_(std::move(inner)),
        device_(device),
        end_(end),
        outputs_(std::move(outputs)),
        inputs_(std::move(inputs)) {}

  bool isCompleted() override { return !inner_ || inner_->isCompleted(); }
  bool isSuccess() const override { return !inner_ || inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_ ? inner_->exception() : nullptr; }
  void abort() override {
    if (inner_) inner_->abort();
  }
  std::vector<at::Tensor> result() override {
    Tensors results;
    for (const Staged& each : outputs_) results.push_back(each.device);
    return results;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (inner_ && !inner_->wait(timeout)) return false;
    const std::lock_guard lock(mutex_);
    if (!delivered_) {
      const at::AutoDispatchBelowADInplaceOrView below;
      for (const Staged& each : outputs_) host_view(each.device).copy_(each.host);
    }
    delivered_ = true;
    inputs_.clear();
    wait_for(current_stream(device_), end_);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  WorkPtr inner_;
  const c10::DeviceIndex device_;
  const Moment end_;
  std::vector<Staged> outputs_;
  Tensors inputs_;  // the stream still reads them
  std::mutex mutex_;
  bool delivered_ = false;
};

std::atomic<int64_t> splits = 0;

class StagingBackend final : public c10d::Backend, public comm::HasCapabilities {
 public:
  explicit StagingBackend(const comm::DeviceBackendRequest& request)
      : Backend(request.rank, request.size),
        inner_(request.host),
        device_(request.device),
        stream_(next_stream(device_.index(), request.high_priority_streams)),
        split_color_(request.split_color) {
    if (!request.split_from) return;
    split_from_ = c10::dynamic_intrusive_pointer_cast<StagingBackend>(request.split_from);
    TORCH_CHECK(split_from_ && split_from_->device_ == device_, "[pretend] a group split from one of another device");
  }

  const std::string getBackendName() const override { return "pretend"; }
  comm::Capabilities capabilities() const override { return comm::capabilities_of(*inner_); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void abort() override { inner_->abort(); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return carry("allreduce", tensors, tensors, [&](Tensors& in, Tensors& out) {
      out = in;
      return inner_->allreduce(out, options);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return carry("broadcast", tensors, tensors, [&](Tensors& in, Tensors& out) {
      out = in;
      return inner_->broadcast(out, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return carry("allgather", {input}, {output},
                 [&](Tensors& in, Tensors& out) { return inner_->_allgather_base(out[0], in[0], options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return carry("reduce_scatter", {input}, {output},
                 [&](Tensors& in, Tensors& out) { return inner_->_reduce_scatter_base(out[0], in[0], options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return carry("alltoall", {input}, {output}, [&](Tensors& in, Tensors& out) {
      return inner_->alltoall_base(out[0], in[0], output_splits, input_splits, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const Tensors sent = inputs.empty() ? Tensors() : inputs[0];
    return carry("scatter", sent, outputs, [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!inputs.empty()) lists.push_back(in);
      return inner_->scatter(out, lists, options);
    });
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return carry("send", tensors, {}, [&](Tensors& in, Tensors&) { return inner_->send(in, destination, tag); });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return carry("recv", {}, tensors, [&](Tensors&, Tensors& out) { return inner_->recv(out, source, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    make_communicator();
    host_wait(current_stream(device_.index()), "barrier");
    return inner_->barrier(options);
  }

 private:
  // Called in the first collective, as c10d does for NCCL. A split needs all ranks of the other communicator, which
  // must have no collective in progress. Ranks with one color become a group, ordered by the ranks that they pass.
  void make_communicator() {
    connected_ = true;
    const auto parent = std::exchange(split_from_, nullptr);
    if (!parent) return;
    TORCH_CHECK(parent->connected_, "[pretend] a group is split from one without a communicator");
    TORCH_CHECK(host_has_seen(parent->stream_), "[pretend] a group is split from one with collectives under way");
    at::Tensor own = at::tensor({int64_t{split_color_}, int64_t{getRank()}}).view({1, 2});
    at::Tensor all = at::empty({parent->getSize(), 2}, own.options());
    parent->inner_->_allgather_base(all, own, {})->wait();
    const at::Tensor ranks = all.index({all.select(1, 0) == split_color_}).select(1, 1);
    TORCH_CHECK(at::equal(std::get<0>(ranks.sort()), at::arange(getSize())), "[pretend] ranks ", ranks,
                " come for color ", split_color_, ", wanted ", getSize());
    ++splits;
  }

  template <class Begin>
  WorkPtr carry(const char* name, const Tensors& inputs, const Tensors& outputs, const Begin& begin) {
    const at::AutoDispatchBelowADInplaceOrView below;
    make_communicator();
    const int index = device_.index();
    refuse_capture(current_stream(device_.index()), name);
    std::vector<Touch> touches;
    Tensors sent, received;
    for (const at::Tensor& input : inputs) {
      TORCH_CHECK(input.device() == device_, "[pretend] ", name, ": a tensor on ", input.device(),
                  " in a group of device ", device_);
      add_touch(touches, input, false);
    }
    for (const at::Tensor& output : outputs) {
      TORCH_CHECK(output.device() == device_, "[pretend] ", name, ": a tensor on ", output.device(),
                  " in a group of device ", device_);
      add_touch(touches, output, true);
      received.push_back(at::empty(output.sizes(), output.options().device(at::kCPU)));
    }
    wait_for(stream_, now(current_stream(device_.index())));
    const Moment end = launch(stream_, name, touches);
    count(index, Count::kCollective);
    for (const at::Tensor& input : inputs) sent.push_back(host_view(input).clone());
    WorkPtr inner = begin(sent, received);
    std::vector<Staged> staged;
    for (size_t i = 0; i < outputs.size(); ++i) {
      // Before wait() the output must show neither the old values nor the new ones.
      std::vector<Touch> whole;
      add_touch(whole, outputs[i], true);
      if (!whole.empty() && outputs[i].is_contiguous()) std::memset(shadow(whole[0].begin), kRubbish, whole[0].bytes);
      staged.push_back({outputs[i], received[i]});
    }
    return c10::make_intrusive<StagedWork>(std::move(inner), device_.index(), end, std::move(staged), inputs);
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  const c10::Device device_;
  const c10::Stream stream_;
  c10::intrusive_ptr<StagingBackend> split_from_;  // until the split
  const int split_color_;
  bool connected_ = false;
};

}  // namespace

int64_t groups_split() { return splits; }

void register_backend() {
  comm::register_device_backend(c10::kPrivateUse1, [](const comm::DeviceBackendRequest& request) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<StagingBackend>(request));
  });
}

}  // namespace tessera::pretend
