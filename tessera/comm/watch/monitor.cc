#include "tessera/comm/watch/monitor.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/errors/error_report.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/errors/plain_reason.h"
#include "tessera/comm/watch/end_broken_message.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFailureReportTimeout{4000};
constexpr milliseconds kOverdue{3000};  // added to the timeout, which the back-end should enforce itself

constexpr const char* kSignalReason = "SIGUSR2";

std::atomic<uint64_t> signals{0};

std::filesystem::path record_path(const MonitorOptions& options) {
  return options.trace_folder.empty() ? options.trace_folder : options.trace_folder / flight_record_name(options.rank);
}

// Increments `count`. The destruction of the returned handle locks `mutex` and decrements `count`. The caller of this
// function holds `mutex`.
std::shared_ptr<void> increment_while_held(int& count, std::mutex& mutex) {
  ++count;
  return {&count, [&count, &mutex](void*) {
            const std::lock_guard held(mutex);
            --count;
          }};
}

// State of a back-end's work. A failed NCCL work counts as completed, too; isCompleted() throws when CUDA is in error.
struct WorkEnd {
  bool ended = false;
  std::exception_ptr failure;
};

WorkEnd end_state_of(c10d::Work& work) noexcept {
  try {
    if (!work.isCompleted()) return {};
    return {.ended = true, .failure = work.exception()};
  } catch (...) {
    return {.ended = true, .failure = std::current_exception()};
  }
}

}  // namespace

// Installs a handler for SIGUSR2, unless this signal already has another action than the default. The handler only
// increments the counter `signals`, which is safe in a signal handler. Monitor::tick() writes the flight record when
// the counter has changed since the last tick().
void write_records_on_signal() {
  struct sigaction now {};
  if (::sigaction(SIGUSR2, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction counting {};
  counting.sa_handler = [](int) { signals.fetch_add(1, std::memory_order_relaxed); };
  counting.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR2, &counting, nullptr);
}

CheckMode parse_check_mode(std::string_view name) {
  if (name == "off") return CheckMode::kOff;
  if (name == "timeout") return CheckMode::kTimeout;
  if (name == "always") return CheckMode::kAlways;
  raise(ErrorKind::kConfig, "[comm.check] '{}': wanted off, timeout or always", name);
}

Monitor::Monitor(MonitorOptions options)
    : options_(std::move(options)),
      recorder_(options_.rank, options_.size),
      signals_seen_(signals.load()),
      writer_(record_path(options_), options_.publish) {}

Monitor::~Monitor() { leave(false); }

void Monitor::set_reporter(std::unique_ptr<FailureReporter> reporter) {
  const std::lock_guard lock(mutex_);
  reporter_ = std::move(reporter);
}

// FailureReporter::leave() waits for the watchdog's thread, which may be in on_failure_report() and need `mutex_`. So
// the reporter is moved out of `reporter_` under the lock, and its leave() is called without the lock.
void Monitor::leave(bool failed) noexcept {
  std::unique_ptr<FailureReporter> reporter;
  {
    const std::lock_guard lock(mutex_);
    reporter = std::move(reporter_);
    failed |= report_.has_value();
  }
  if (reporter) reporter->leave(failed);
  if (abort_thread_.joinable()) abort_thread_.join();
}

void Monitor::track_work(uint64_t ticket, const Signature& signature, c10::intrusive_ptr<c10d::Work> work) {
  const std::lock_guard lock(in_flight_mutex_);
  in_flight_.push_back(
      {ticket, signature.members, signature.sequence, Clock::now(), std::move(work), false, is_message(signature.op)});
}

// Adds the call to `in_flight_` before the back-end starts the call, with a null Work. tick() then finds the call
// overdue even when the start never returns: the start of the first collective of an NCCL group waits for all ranks.
void Monitor::before_device_start(uint64_t ticket, const Signature& signature) {
  {
    const std::lock_guard lock(in_flight_mutex_);
    if (in_flight_.size() >= search_at_size_) record_ended_calls();
    if (failure_) raise(ErrorKind::kComm, "{}", failure_->text);
    in_flight_.push_back({ticket, signature.members, signature.sequence, Clock::now(), nullptr, false});
  }
  recorder_.mark(ticket, CallState::kWaiting);
}

void Monitor::after_device_start(uint64_t ticket, c10::intrusive_ptr<c10d::Work> work) {
  recorder_.unmark_wait(ticket);
  if (!work) return release(ticket);
  const std::lock_guard lock(in_flight_mutex_);
  const auto found = std::ranges::find_if(in_flight_, [&](const TrackedCall& one) { return one.ticket == ticket; });
  if (found != in_flight_.end()) found->work = std::move(work);
}

void Monitor::untrack(uint64_t ticket) {
  release(ticket);
  recorder_.unmark_wait(ticket);
}

void Monitor::release(uint64_t ticket) {
  const std::lock_guard lock(in_flight_mutex_);
  std::erase_if(in_flight_, [&](const TrackedCall& one) { return one.ticket == ticket; });
}

void Monitor::finish(uint64_t ticket) {
  release(ticket);
  recorder_.mark(ticket, CallState::kFinished);
}

// A call that has ended already is marked as finished. Any other call stays in `in_flight_` in state kStarted, although
// the rank has waited for it, until record_if_ended() sees its end.
void Monitor::detach_to_device(uint64_t ticket) {
  {
    const std::lock_guard lock(in_flight_mutex_);
    const auto found = std::ranges::find_if(in_flight_, [&](const TrackedCall& one) { return one.ticket == ticket; });
    if (found != in_flight_.end() && found->work) {
      const WorkEnd end = end_state_of(*found->work);
      if (end.failure) std::rethrow_exception(end.failure);
      found->detached = !end.ended;
      if (found->detached) return recorder_.mark(ticket, CallState::kStarted);
    }
  }
  finish(ticket);
}

// Records the end of a call that detach_to_device() has kept in `in_flight_`. Returns true when the call has ended.
bool Monitor::record_if_ended(const TrackedCall& one) {
  if (!one.detached) return false;
  const WorkEnd end = end_state_of(*one.work);
  if (!end.ended) return false;
  recorder_.mark(one.ticket, end.failure ? CallState::kFailed : CallState::kFinished);
  if (end.failure && !failure_) failure_ = failed_on_device(one, end.failure);
  return true;
}

// Removes the calls that have ended from in_flight_. before_device_start() calls this function again only when
// in_flight_ has twice the size that is left now (at least kSearchAtSize), so the average cost per call is constant
// however many calls are under way.
void Monitor::record_ended_calls() {
  std::erase_if(in_flight_, [this](const TrackedCall& one) { return record_if_ended(one); });
  search_at_size_ = std::max(kSearchAtSize, 2 * in_flight_.size());
}

CallFailure Monitor::failed_on_device(const TrackedCall& one, const std::exception_ptr& failure) const {
  std::string reason = "an unknown error";
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    reason = plain_reason(error);
  } catch (...) {
  }
  const auto signature = recorder_.signature(one.ticket);
  return {.group = one.group,
          .sequence = one.sequence,
          .text = fmt::format("{} (call {} of group '{}') failed on the device: {} (NCCL_DEBUG=WARN says more)",
                              signature ? to_string(*signature) : "a collective", one.sequence,
                              signature ? signature->group : "", reason)};
}

// `mutex_` must not be held during report_call_failure(): if the ranks are threads, the report is delivered inside that
// call, by on_failure_report() of this monitor. `reporter_` stays valid meanwhile, because only this rank's thread ends
// it (leave()).
std::optional<FailureReport> Monitor::fail(uint64_t ticket, const CallFailure& failure) {
  release(ticket);
  std::unique_lock lock(mutex_);
  if (!report_ && !rank_has_failed_ && reporter_) {
    FailureReporter& reporter = *reporter_;
    lock.unlock();
    const bool answer_follows = reporter.report_call_failure(failure);
    lock.lock();
    if (answer_follows) heard_.wait_for(lock, kFailureReportTimeout, [&] { return report_.has_value(); });
  }
  rank_has_failed_ = true;
  auto report = report_;
  lock.unlock();
  recorder_.mark(ticket, CallState::kFailed);
  write_record(report ? report->text : failure.text);
  return report;
}

std::optional<FailureReport> Monitor::wait_for_failure_report(milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (reporter_ && reporter_->detects_dead_ranks()) heard_.wait_for(lock, limit, [&] { return report_.has_value(); });
  if (report_) rank_has_failed_ = true;
  return report_;
}

std::optional<FailureReport> Monitor::failure_report() {
  const std::lock_guard lock(mutex_);
  return report_;
}

void Monitor::fail_with(uint64_t ticket, const std::string& message) {
  release(ticket);
  recorder_.mark(ticket, CallState::kFailed);
  {
    const std::lock_guard lock(mutex_);
    rank_has_failed_ = true;
    if (reporter_) reporter_->report_rank_failure(message);
  }
  write_record(message);
}

std::shared_ptr<void> Monitor::hold() {
  const std::lock_guard lock(mutex_);
  return increment_while_held(holds_, mutex_);
}

std::shared_ptr<void> Monitor::close() {
  const std::lock_guard lock(mutex_);
  if (closes_ == 0) closes_since_ = Clock::now();
  return increment_while_held(closes_, mutex_);
}

// Does nothing when this rank has failed before (fail(), fail_with(), wait_for_failure_report()): the other ranks then
// know the cause already.
void Monitor::report_own_failure() {
  const std::lock_guard lock(mutex_);
  if (rank_has_failed_) return;
  rank_has_failed_ = true;
  if (reporter_ && !report_) reporter_->report_rank_failure("see the error message of that rank");
}

Monitor::Clock::time_point Monitor::abandon_deadline() {
  const std::lock_guard lock(mutex_);
  if (abandon_deadline_ == Clock::time_point()) abandon_deadline_ = Clock::now() + kPatience;
  return abandon_deadline_;
}

void Monitor::end_messages() noexcept {
  aborted_.store(true, std::memory_order_relaxed);
  const std::lock_guard lock(in_flight_mutex_);
  for (const TrackedCall& one : in_flight_) {
    if (one.message_of_host) end_broken_message(*one.work);
  }
}

// The record of a failure is final: records on request (SIGUSR2) may be replaced by later ones, but nothing may replace
// the record of the moment of the failure.
void Monitor::write_record(const std::string& reason) noexcept {
  if (options_.trace_folder.empty()) return;
  try {
    const std::lock_guard lock(writing_);
    if (written_) return;
    written_ = reason != kSignalReason;
    {
      const std::lock_guard settling(in_flight_mutex_);
      record_ended_calls();
    }
    writer_.write(to_json(recorder_.record(reason)));
  } catch (const std::exception& error) {
    log_warning("[comm.flight_record] not written: {}", error.what());
  }
}

FlightRecord Monitor::recent_calls(uint32_t group, uint64_t sequence) {
  {
    const std::lock_guard lock(in_flight_mutex_);
    record_ended_calls();
  }
  return recorder_.summary(group, sequence);
}

// Order: the report is stored first, then the flight record is taken, because aborting makes waiting calls look ended;
// then the threads in fail() are woken, and the groups are aborted.
void Monitor::on_failure_report(const FailureReport& report) {
  {
    const std::lock_guard lock(mutex_);
    if (report_) return;
    report_ = report;
    report_time_ = Clock::now();
  }
  write_record(report.text);
  heard_.notify_all();
  if (!abort_groups_) return;
  bool starting = false;
  {
    const std::lock_guard lock(in_flight_mutex_);
    starting = std::ranges::any_of(in_flight_, [](const TrackedCall& one) { return !one.work; });
  }
  // A call whose TrackedCall::work is null is a collective or message on a device: before_device_start() has added it
  // to `in_flight_`, and the back-end's function that starts it has not returned yet. Until that function returns, the
  // back-end's abort() may block. So a separate thread runs `abort_groups_`, and the watchdog's thread continues and
  // can end the process.
  if (starting) {
    abort_thread_ = std::thread(abort_groups_);
  } else {
    abort_groups_();
  }
}

void Monitor::tick() {
  if (const uint64_t seen = signals.load(); seen != signals_seen_) {
    signals_seen_ = seen;
    if (options_.trace_folder.empty()) {
      log_warning("[comm.flight_record] SIGUSR2: no folder to write to. Set TESSERA_TRACE_DIR.");
    }
    write_record(kSignalReason);
  }
  report_failed();
  report_overdue();
  end_process_when_due();
}

void Monitor::report(const CallFailure& failure) {
  const std::lock_guard lock(mutex_);
  if (reporter_) reporter_->report_call_failure(failure);
}

void Monitor::report_failed() {
  CallFailure failure;
  {
    const std::lock_guard lock(in_flight_mutex_);
    record_ended_calls();
    if (!failure_ || failure_reported_) return;
    failure_reported_ = true;
    failure = *failure_;
  }
  report(failure);
}

// Reports a call whose back-end has not enforced the timeout. Only the first one is reported: one report makes the
// world unusable.
void Monitor::report_overdue() {
  CallFailure failure;
  {
    const std::lock_guard lock(in_flight_mutex_);
    if (overdue_reported_) return;
    const auto now = Clock::now();
    const auto late = std::ranges::find_if(in_flight_, [&](const TrackedCall& one) {
      return now - one.started > options_.timeout + kOverdue && !(one.work && end_state_of(*one.work).ended);
    });
    if (late == in_flight_.end()) return;
    overdue_reported_ = true;
    failure = {.group = late->group,
               .sequence = late->sequence,
               .text = fmt::format("timed out after {} s", options_.timeout.count() / 1000),
               .timed_out = true};
  }
  report(failure);
}

// Ends the process in the three cases that monitor.h describes. The limit kGrace counts from the failure report. The
// limit for a destruction or for a wait counts from the failure report, or from the start of the destruction or of the
// wait if this was later.
void Monitor::end_process_when_due() {
  std::optional<FailureReport> report;
  const char* why = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!options_.ends_process || !report_) return;
    const auto now = Clock::now();
    const auto limit = [this](auto usual) { return holds_ > 0 ? kLongestHold : usual; };
    const auto waits_since = recorder_.oldest_wait();
    if (closes_ > 0 && now - std::max(report_time_, closes_since_) > limit(kLongestClose)) {
      why = "Its connections do not close, so this rank's process is ended.";
    } else if (!rank_has_failed_ && now - report_time_ >= limit(kGrace)) {
      why = "This rank has made no collective since, which would have thrown this error, so its process is ended.";
    } else if (waits_since && now - std::max(report_time_, *waits_since) > limit(kLongestClose)) {
      why = "A collective that was aborted does not end, so this rank's process is ended.";
    }
    if (why == nullptr) return;
    report = report_;
  }
  end_process(*report, why);
}

// _Exit() runs no destructors: the destructor of a back-end may hang.
void Monitor::end_process(const FailureReport& report, const std::string& why) {
  const std::string text = fmt::format("[comm.watchdog] {}. {}", report.text, why);
  const std::unique_ptr<Error> error = report.is_consequence
                                           ? std::unique_ptr<Error>(std::make_unique<PeerFailed>(text))
                                           : std::make_unique<Error>(ErrorKind::kComm, text);
  if (!report_error(*error)) {
    const std::string line = fmt::format("tessera: error: rank {}: {}\n", options_.rank, text);
    std::fputs(line.c_str(), stderr);
    std::fflush(stderr);  // the program may have made stderr buffered
  }
  std::_Exit(error->exit_code());
}

}  // namespace tessera::comm
