// How a collective starts: its checks, its signature, the record of it, and what its Pending waits for. Internal to
// comm.
//
//   CollectiveStart call(group, Op::kBroadcast, subject);
//   call.require_plain(tensor, "tensor");
//   call.sign({.dtype = dtype, .sizes = tensor.sizes(), .root = root});      // from here on the call counts
//   std::vector<at::Tensor> tensors = {call.keep_output(tensor)};
//   return call.start([&](c10d::Backend& backend) { return backend.broadcast(tensors, options); });
//
// start() and finished() are COLLECTIVE over the group, or for a message over its two ranks. Errors: kShape from the
// checks; from start() and finished() what Pending::wait() throws. As thread-safe as the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/collectives/communication_time.h"
#include "tessera/comm/collectives/signature_exchange.h"
#include "tessera/comm/group/observer.h"
#include "tessera/comm/group/signature.h"
#include "tessera/comm/watch/monitor.h"

namespace tessera::comm {

struct Pending::State {
  Signature signature;
  int rank = 0, size = 1;  // of the group
  std::shared_ptr<Monitor> monitor;
  uint64_t ticket = 0;                        // the monitor's
  c10::intrusive_ptr<c10d::Backend> backend;  // outlives the work
  c10::intrusive_ptr<c10d::Work> work;
  Announcement announcement;                              // of a send whose receiver compares
  std::function<c10::intrusive_ptr<c10d::Work>()> begin;  // what wait() has to start first
  std::vector<at::Tensor> buffers;                        // kept alive until the work has ended
  std::function<void()> finish;                           // runs on the waiting thread after the work
  std::exception_ptr failure;                             // of a wait
  int unwinding = std::uncaught_exceptions();
};

class CollectiveStart {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  CollectiveStart(Group& group, Op op, std::string_view subject)
      : group_(group), op_(op), subject_(subject), state_(std::make_unique<Pending::State>()) {}

  void require(bool condition, const std::string& what) const;
  void require_plain(const at::Tensor& tensor, const char* name) const;
  void require_same_dtype(const at::Tensor& output, const at::Tensor& input) const;
  void require_position(int position, const char* name) const;

  // What the back-end gets. Without its own version counter a tensor would be bumped from the back-end's threads.
  at::Tensor keep(const at::Tensor& tensor);
  at::Tensor keep_output(const at::Tensor& tensor);

  // What observers are told at the start.
  void count(int64_t bytes) { bytes_ = bytes; }
  void on_finish(std::function<void()> finish) { state_->finish = std::move(finish); }

  // All checks are passed: the call counts. `call` holds what must agree on all ranks beside group, number, operation
  // and subject, which are filled in here.
  void sign(SignatureFields call);

  // begin(backend) returns the work; it may be empty when there is nothing to carry. It is copied when a receive has to
  // wait for what its sender announces, and then called in Pending::wait().
  template <class Begin>
  Pending start(Begin begin) {
    try {
      if (!prepare()) {
        state_->begin = awaiting_sender([backend = state_->backend, begin]() mutable { return begin(*backend); });
        return Pending(std::move(state_));
      }
      state_->work = begin(*state_->backend);
    } catch (const std::exception& error) {
      fail(error);
    }
    return started();
  }
  // There is nothing to move.
  Pending finished();

 private:
  // Tells observers, finds the back-end, compares signatures, and tells the monitor that a device's call begins. False:
  // that is for wait() to do.
  bool prepare();
  std::function<WorkPtr()> awaiting_sender(std::function<WorkPtr()> begin) const;
  Pending started();
  [[noreturn]] void fail(const std::exception& error) const;
  bool compares_first() const;
  void compare();

  const CommunicationTimer timer_;  // a small collective is over when it has been started
  Group& group_;
  const Op op_;
  const std::string_view subject_;
  c10::DeviceType device_ = c10::DeviceType::CPU;  // of the tensors
  std::unique_ptr<Pending::State> state_;
  std::optional<int64_t> bytes_;
};

}  // namespace tessera::comm
