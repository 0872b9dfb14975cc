#include "tessera/comm/collectives/collective_start.h"

#include <fmt/ranges.h>

#include <chrono>
#include <exception>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/collectives/signature_exchange.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/errors/plain_reason.h"
#include "tessera/comm/errors/timed_out.h"
#include "tessera/comm/watch/end_broken_message.h"

namespace tessera::comm {
namespace {

using CollectiveState = PendingCollective::CollectiveState;

std::string call_location(std::string_view verb, std::string_view group, int rank, int size, std::string_view subject,
                          uint64_t sequence) {
  return fmt::format("[comm.{}] {}{}group '{}' (rank {} of {}), call {}", verb, subject, subject.empty() ? "" : ", ",
                     group, rank, size, sequence);
}

std::string where(const CollectiveState& state) {
  const Signature& call = state.signature;
  std::string subject = call.subject;
  if (is_message(call.op)) {
    subject = fmt::format("{} {}, tag {}", call.op == Op::kSend ? "to" : "from", call.root, call.tag);
  }
  return call_location(to_string(call.op), call.group, state.rank, state.size, subject, call.sequence);
}

bool on_device(const CollectiveState& state) { return !state.buffers.empty() && !state.buffers.front().is_cpu(); }

// Tessera's back-ends throw TimedOut. libtorch's back-ends have no type for time-outs, so their message is searched for
// "timed out" in either case of the first letter.
bool is_timeout(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error)) return dynamic_cast<const TimedOut*>(&error) != nullptr;
  return first_line(error).find("imed out") != std::string::npos;
}

// Throws the error of a call that failed. Four cases, in this order:
// - Ranks made different calls: Disagreement, which is also reported to the peers.
// - The arguments do not fit the back-end (any kind but kComm): the error itself, and the call is no longer recorded as
//   under way.
// - The monitor receives one common failure reason for all ranks (up to 4 s, Monitor::fail): that reason.
// - Otherwise the error that this rank has observed: TimedOut, or PeerFailed for a broken connection.
[[noreturn]] void throw_failed(const CollectiveState& state, const std::exception& error) {
  const auto* own = dynamic_cast<const Error*>(&error);
  const std::string reason = own ? own->what() : plain_reason(error);
  if (dynamic_cast<const Disagreement*>(&error)) {
    const std::string message = reason.starts_with('[') ? reason : fmt::format("{}: {}.", where(state), reason);
    if (state.monitor) state.monitor->fail_with(state.ticket, message);
    throw Disagreement(message);
  }
  if (own && own->kind() != ErrorKind::kComm) {  // the arguments do not fit the back-end, or the ranks cannot connect
    if (state.monitor) state.monitor->untrack(state.ticket);
    throw Error(own->kind(), reason.starts_with('[') ? reason : fmt::format("{}: {}", where(state), reason));
  }
  const bool timed_out = is_timeout(error);
  std::optional<FailureReport> report;
  if (state.monitor) {
    const std::string seen = timed_out
                                 ? fmt::format("timed out after {} s", state.monitor->options().timeout.count() / 1000)
                                 : fmt::format("{}: {}", where(state), reason);
    report = state.monitor->fail(
        state.ticket,
        {.group = state.signature.members, .sequence = state.signature.sequence, .text = seen, .timed_out = timed_out});
  }
  if (report) throw_failure_report(*report, fmt::format("{}: {}", where(state), timed_out ? "timed out. " : ""));
  if (timed_out) {
    throw TimedOut(
        fmt::format("{}: {}. Some rank did not start this collective in time: look for the first error of the other "
                    "ranks, or raise comm.timeout_seconds.",
                    where(state), reason));
  }
  throw PeerFailed(
      fmt::format("{}: {}. A peer has ended or has aborted the group{}: the first error of the other ranks says why.",
                  where(state), reason, on_device(state) ? ", or this rank's device has failed" : ""));
}

}  // namespace

void CollectiveStart::require(bool condition, const std::string& message) const {
  TESSERA_CHECK(
      condition, ErrorKind::kShape, "{}: {}",
      call_location(to_string(op_), group_.name(), group_.rank(), group_.size(), subject_, group_.sequence() + 1),
      message);
}

void CollectiveStart::require_plain(const at::Tensor& tensor, const char* name) const {
  require(tensor.defined(), fmt::format("{} is undefined", name));
  require(tensor.is_contiguous(), fmt::format("{} {} is not contiguous. Pass .contiguous().", name, tensor.sizes()));
}

void CollectiveStart::require_same_dtype(const at::Tensor& output, const at::Tensor& input) const {
  require(
      output.scalar_type() == input.scalar_type(),
      fmt::format("output is {}, input {}", c10::toString(output.scalar_type()), c10::toString(input.scalar_type())));
}

void CollectiveStart::require_position(int position, const char* name) const {
  require(position >= 0 && position < group_.size(), fmt::format("{} {} is not in the group", name, position));
}

at::Tensor CollectiveStart::keep(const at::Tensor& tensor) {
  at::Tensor alias = tensor.variable_data();
  device_ = tensor.device().type();
  state_->buffers.push_back(alias);
  return alias;
}

at::Tensor CollectiveStart::keep_output(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return keep(tensor);
}

// Collectives are numbered per group, messages per (sender, receiver, tag). Each rank counts its own calls without
// communication, so equal numbers denote the same call as long as all ranks make the same calls in the same order.
void CollectiveStart::sign(SignatureFields call) {
  if (group_.size() == 1) return;
  call.group = group_.name();
  call.members = group_.context().id;
  call.op = op_;
  call.rank = group_.rank();
  call.subject = subject_;
  if (is_message(op_)) {
    const bool sends = op_ == Op::kSend;
    call.sequence = group_.next_message(sends ? call.rank : call.root, sends ? call.root : call.rank, call.tag);
  } else {
    call.sequence = group_.next_sequence();
  }
  state_->signature = comm::sign(call);
  state_->rank = group_.rank();
  state_->size = group_.size();
  state_->monitor = group_.context().monitor;
  if (state_->monitor) state_->ticket = state_->monitor->start(state_->signature);
}

// A back-end that compares signatures itself (shared memory) gets the signature by announce(). For other back-ends, if
// the setting comm.check is "always" (CheckMode::kAlways), compare() runs before the call begins: for a collective it
// compares the signatures of all ranks, for a send it sends the signature to the receiver. For a receive, prepare()
// returns false, and the signatures are compared later (awaiting_sender()).
bool CollectiveStart::prepare() {
  if (bytes_) CollectiveObserver::notify(op_, *bytes_, group_);
  state_->backend = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&group_.backend(device_));
  if (state_->backend.get() == &group_.backend() && group_.comparing_backend()) {
    group_.comparing_backend()->announce(state_->signature);
  } else if (compares_first()) {
    if (op_ == Op::kRecv) return false;  // the sender's signature may arrive much later: recv() must not block here
    compare();
  }
  if (state_->monitor && on_device(*state_)) state_->monitor->before_device_start(state_->ticket, state_->signature);
  return true;
}

std::function<CollectiveStart::WorkPtr()> CollectiveStart::awaiting_sender(std::function<WorkPtr()> begin) const {
  return [backend = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&group_.backend()), rank = group_.rank(),
          signature = state_->signature, begin = std::move(begin)] {
    await_announced_message(*backend, rank, signature);
    return begin();
  };
}

PendingCollective CollectiveStart::started() {
  if (state_->monitor && on_device(*state_)) {
    state_->monitor->after_device_start(state_->ticket, state_->work);
  } else if (state_->monitor && state_->work) {
    state_->monitor->track_work(state_->ticket, state_->signature, state_->work);
  }
  return PendingCollective(std::move(state_));
}

PendingCollective CollectiveStart::finished() {
  if (group_.size() > 1 && !group_.comparing_backend() && compares_first() && op_ != Op::kRecv) {
    try {
      compare();
    } catch (const std::exception& error) {
      fail(error);
    }
  }
  if (state_->monitor) state_->monitor->finish(state_->ticket);
  if (state_->finish) state_->finish();
  return PendingCollective();
}

void CollectiveStart::fail(const std::exception& error) const { throw_failed(*state_, error); }

bool CollectiveStart::compares_first() const {
  return state_->monitor && state_->monitor->options().check == CheckMode::kAlways;
}

void CollectiveStart::compare() {
  state_->monitor->wait(state_->ticket);
  if (op_ == Op::kSend) {
    state_->announcement = announce_message(group_, state_->signature);
  } else {
    compare_signatures(group_, state_->signature);
  }
}

PendingCollective::PendingCollective() = default;
PendingCollective::PendingCollective(std::unique_ptr<CollectiveState> state) : state_(std::move(state)) {}
PendingCollective::PendingCollective(PendingCollective&&) noexcept = default;

PendingCollective& PendingCollective::operator=(PendingCollective&& other) noexcept {
  if (this != &other) {
    { PendingCollective ended(std::move(*this)); }
    state_ = std::move(other.state_);
  }
  return *this;
}

namespace {

// Compares the sender's announced signature and then starts the receive. The monitor has marked the call as waiting.
// For a receive on a device, after_device_start() clears this mark, so wait() sets it again.
void begin_receive(CollectiveState& state) {
  if (!on_device(state)) {
    state.work = state.begin();
    return;
  }
  state.monitor->before_device_start(state.ticket, state.signature);
  state.work = state.begin();
  state.monitor->after_device_start(state.ticket, state.work);
  state.monitor->wait(state.ticket);
}

bool is_message_of_host(const CollectiveState& state) { return is_message(state.signature.op) && !on_device(state); }

// Waits until the works of this call have ended. Called after abort() of the back-end, which ends most waits at once.
// Returns false at the time limit: a thread of Gloo can hang in a work (end_broken_message.h).
bool wait_for_aborted_works(CollectiveState& state) {
  using Clock = std::chrono::steady_clock;
  const auto limit = state.monitor ? state.monitor->abandon_deadline() : Clock::now() + Monitor::kPatience;
  for (const auto* work : {&state.work, &state.announcement.work}) {
    if (!*work) continue;
    if (is_message_of_host(state)) {
      end_broken_message(**work);
      continue;
    }
    while (!(*work)->isCompleted()) {
      if (Clock::now() >= limit) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

// Ends a call while an exception unwinds the stack. This rank is about to fail, so it must not wait for its peers: the
// back-end is aborted, and only then are the works waited for, up to Monitor::kPatience. A work that has not ended by
// then is leaked on purpose: a thread of the back-end may still write to its buffers.
void abandon(std::unique_ptr<CollectiveState> state) noexcept {
  const auto monitor = state->monitor;
  const auto closes = monitor ? monitor->close() : nullptr;  // `state` may hold the last reference to the back-end
  if (monitor) monitor->report_own_failure();
  try {
    state->backend->abort();
  } catch (...) {  // the connections were closed before
  }
  if (state->begin) return;  // the receive has not started
  if (!wait_for_aborted_works(*state)) {
    static_cast<void>(state.release());
    return;
  }
  try {
    PendingCollective(std::move(state)).wait();
  } catch (...) {  // the exception that unwinds the stack is the one to report
  }
}

}  // namespace

// If there are more uncaught exceptions than when the call started, stack unwinding destroys this PendingCollective.
// The counts are compared, because a collective may itself run in a destructor during an earlier unwinding.
PendingCollective::~PendingCollective() {
  if (!state_ || state_->failure) return;
  if (std::uncaught_exceptions() > state_->unwinding) {
    abandon(std::move(state_));
    return;
  }
  try {
    wait();
  } catch (const std::exception& error) {
    log_warning("{}", error.what());
  }
}

// Stores the first failure and rethrows it in later calls of wait(). After a failure `state_` is not reset, so that the
// buffers stay alive. When the group was aborted (Monitor::end_messages), end_broken_message() is called before the
// wait for a message of CPU tensors, because Gloo may not wake this wait (end_broken_message.h).
void PendingCollective::wait() {
  if (!state_) return;
  const CommunicationTimer timer;
  if (state_->failure) std::rethrow_exception(state_->failure);
  try {
    try {
      if (state_->monitor) state_->monitor->wait(state_->ticket);
      if (state_->begin) begin_receive(*state_);
      const bool ends_now = state_->monitor && state_->monitor->is_aborted() && is_message_of_host(*state_);
      for (const auto* work : {&state_->work, &state_->announcement.work}) {
        if (*work && ends_now) end_broken_message(**work);
        if (*work) TESSERA_CHECK((*work)->wait(), ErrorKind::kComm, "aborted");
      }
      // On a device, work->wait() only orders the current stream after the collective; the collective may still run.
      if (state_->monitor && on_device(*state_)) state_->monitor->detach_to_device(state_->ticket);
    } catch (const std::exception& error) {
      throw_failed(*state_, error);
    }
  } catch (...) {
    state_->failure = std::current_exception();
    throw;
  }
  const auto state = std::move(state_);
  if (state->monitor && !on_device(*state)) state->monitor->finish(state->ticket);
  if (state->finish) state->finish();
}

bool PendingCollective::done() const {
  if (!state_ || state_->failure) return true;
  return !state_->begin && (!state_->work || state_->work->isCompleted());
}

}  // namespace tessera::comm
