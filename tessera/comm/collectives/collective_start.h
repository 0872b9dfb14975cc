// Starts a collective or message: checks the arguments, makes the call's Signature (operation, dtype, sizes and so on,
// by which ranks detect that they make different calls), records the call in the flight recorder, and makes the
// PendingCollective. Internal to comm.
//
//   CollectiveStart call(group, Op::kBroadcast, subject);
//   call.require_plain(tensor, "tensor");
//   call.sign({.dtype = dtype, .sizes = tensor.sizes(), .root = root});      // makes the Signature, records the call
//   std::vector<at::Tensor> tensors = {call.keep_output(tensor)};
//   return call.start([&](c10d::Backend& backend) { return backend.broadcast(tensors, options); });
//
// A call in which this rank exchanges no data ends with finished() in place of start(). Both are COLLECTIVE over the
// group; for send and recv, over the two ranks of the message. Errors: the require functions throw kShape; start() and
// finished() throw the same errors as PendingCollective::wait(). A CollectiveStart is as thread-safe as its group.
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

struct PendingCollective::CollectiveState {
  Signature signature;
  int rank = 0, size = 1;  // position of this rank in the group, and number of ranks
  std::shared_ptr<Monitor> monitor;
  uint64_t ticket = 0;                        // number of this call in the monitor's flight recorder
  c10::intrusive_ptr<c10d::Backend> backend;  // kept alive: the back-end must outlive its work
  c10::intrusive_ptr<c10d::Work> work;
  SignatureMessage announcement;                          // a send's signature on its way to the receiver
  std::function<c10::intrusive_ptr<c10d::Work>()> begin;  // set: wait() must start the receive first
  std::vector<at::Tensor> buffers;                        // kept alive until the work has ended
  std::function<void()> finish;                           // runs on the waiting thread after the work
  std::exception_ptr failure;                             // thrown by an earlier wait(), rethrown by later ones
  int unwinding = std::uncaught_exceptions();             // when the call started
};

class CollectiveStart {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  CollectiveStart(Group& group, Op op, std::string_view subject)
      : group_(group), op_(op), subject_(subject), state_(std::make_unique<PendingCollective::CollectiveState>()) {}

  void require(bool condition, const std::string& message) const;
  void require_plain(const at::Tensor& tensor, const char* name) const;
  void require_same_dtype(const at::Tensor& output, const at::Tensor& input) const;
  void require_position(int position, const char* name) const;

  // Returns an alias of the tensor for the back-end, and keeps the alias until the work has ended. The alias has its
  // own version counter: otherwise threads of the back-end would increment the counter of the caller's tensor.
  // keep_output() first increments the caller's counter once.
  at::Tensor keep(const at::Tensor& tensor);
  at::Tensor keep_output(const at::Tensor& tensor);

  // `bytes`: the traffic that start() reports to CollectiveObserver. Without a call of count() nothing is reported.
  void count(int64_t bytes) { bytes_ = bytes; }
  // `finish` runs on the thread that waits, once the work has ended without error.
  void on_finish(std::function<void()> finish) { state_->finish = std::move(finish); }

  // Makes the call's Signature, with the next number in the group; to be called after all checks have passed. `call`
  // holds the fields that must agree on all ranks. Group, number, operation, rank and subject are filled in here.
  void sign(SignatureFields call);

  // `begin(backend)` starts the operation and returns its work, or an empty pointer when there is no data to move. A
  // receive that must first compare its sender's signature keeps a copy of `begin`, and PendingCollective::wait()
  // calls the copy.
  template <class Begin>
  PendingCollective start(Begin begin) {
    try {
      if (!prepare()) {
        state_->begin = awaiting_sender([backend = state_->backend, begin]() mutable { return begin(*backend); });
        return PendingCollective(std::move(state_));
      }
      state_->work = begin(*state_->backend);
    } catch (const std::exception& error) {
      fail(error);
    }
    return started();
  }
  // Ends the call at once, for calls in which this rank exchanges no data with other ranks: a group of one rank, or
  // an empty tensor. Under comm.check: always the signatures are compared nevertheless, except for a receive and in a
  // group that has a comparing_backend().
  PendingCollective finished();

 private:
  // Notifies observers and finds the back-end. A back-end that compares signatures itself is given the signature; for
  // other back-ends, this function compares the ranks' signatures under comm.check: always. For a call on an
  // accelerator, also tells the monitor that the call begins (Monitor::before_device_start). Returns false for a
  // receive whose signature PendingCollective::wait() has to compare before the receive can begin.
  bool prepare();
  std::function<WorkPtr()> awaiting_sender(std::function<WorkPtr()> begin) const;
  PendingCollective started();
  [[noreturn]] void fail(const std::exception& error) const;
  bool compares_first() const;
  void compare();

  const CommunicationTimer timer_;  // counts the start as communication: a small collective may end inside it
  Group& group_;
  const Op op_;
  const std::string_view subject_;
  c10::DeviceType device_ = c10::DeviceType::CPU;  // device of the tensors
  std::unique_ptr<PendingCollective::CollectiveState> state_;
  std::optional<int64_t> bytes_;
};

}  // namespace tessera::comm
