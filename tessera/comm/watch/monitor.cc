#include "tessera/comm/watch/monitor.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/errors/error_report.h"
#include "tessera/comm/errors/peer_failed.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kVerdictDelay{4000};
constexpr milliseconds kOverdue{3000};  // beyond the timeout, which the back-end itself should keep

constexpr const char* kAsked = "SIGUSR2";

std::atomic<uint64_t> signals{0};

std::filesystem::path record_path(const MonitorOptions& options) {
  return options.trace_folder.empty() ? options.trace_folder : options.trace_folder / flight_record_name(options.rank);
}

// Adds one as long as the result lives. The caller holds the mutex.
std::shared_ptr<void> count_in(int& count, std::mutex& mutex) {
  ++count;
  return {&count, [&count, &mutex](void*) {
            const std::lock_guard held(mutex);
            --count;
          }};
}

}  // namespace

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

void Monitor::attend(std::unique_ptr<Peers> peers) {
  const std::lock_guard lock(mutex_);
  peers_ = std::move(peers);
}

void Monitor::leave(bool failed) noexcept {
  std::unique_ptr<Peers> peers;
  {
    const std::lock_guard lock(mutex_);
    peers = std::move(peers_);
    failed |= verdict_.has_value();
  }
  if (peers) peers->leave(failed);
}

void Monitor::carry(uint64_t ticket, const Signature& signature, c10::intrusive_ptr<c10d::Work> work) {
  const std::lock_guard lock(in_flight_mutex_);
  in_flight_.push_back({ticket, signature.members, signature.sequence, Clock::now(), std::move(work), false});
}

void Monitor::release(uint64_t ticket) {
  const std::lock_guard lock(in_flight_mutex_);
  std::erase_if(in_flight_, [&](const InFlight& one) { return one.ticket == ticket; });
}

void Monitor::finish(uint64_t ticket) {
  release(ticket);
  recorder_.mark(ticket, CallState::kFinished);
}

void Monitor::leave_running(uint64_t ticket) {
  {
    const std::lock_guard lock(in_flight_mutex_);
    const auto found =
        std::find_if(in_flight_.begin(), in_flight_.end(), [&](const InFlight& one) { return one.ticket == ticket; });
    if (found != in_flight_.end() && !found->work->isCompleted()) {
      found->left_running = true;
      recorder_.mark(ticket, CallState::kStarted);
      return;
    }
  }
  finish(ticket);
}

void Monitor::finish_what_ran() {
  std::vector<uint64_t> ended;
  {
    const std::lock_guard lock(in_flight_mutex_);
    std::erase_if(in_flight_, [&](const InFlight& one) {
      if (!one.left_running || !one.work->isCompleted()) return false;
      ended.push_back(one.ticket);
      return true;
    });
  }
  for (const uint64_t ticket : ended) recorder_.mark(ticket, CallState::kFinished);
}

std::optional<Verdict> Monitor::fail(uint64_t ticket, const Trouble& trouble) {
  release(ticket);
  std::unique_lock lock(mutex_);
  if (!verdict_ && !thrown_ && peers_) {
    Peers& peers = *peers_;  // this thread is the one that ends it
    lock.unlock();           // the answer may come before the call returns
    const bool answer_follows = peers.report_trouble(trouble);
    lock.lock();
    if (answer_follows) heard_.wait_for(lock, kVerdictDelay, [&] { return verdict_.has_value(); });
  }
  thrown_ = true;
  const auto verdict = verdict_;
  lock.unlock();
  recorder_.mark(ticket, CallState::kFailed);
  write_record(verdict ? verdict->text : trouble.text);
  return verdict;
}

std::optional<Verdict> Monitor::await_verdict(milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (peers_ && peers_->hears_of_ends()) heard_.wait_for(lock, limit, [&] { return verdict_.has_value(); });
  if (verdict_) thrown_ = true;
  return verdict_;
}

std::optional<Verdict> Monitor::verdict() {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

void Monitor::fail_with(uint64_t ticket, const std::string& message) {
  release(ticket);
  recorder_.mark(ticket, CallState::kFailed);
  {
    const std::lock_guard lock(mutex_);
    thrown_ = true;
    if (peers_) peers_->report_failure(message);
  }
  write_record(message);
}

std::shared_ptr<void> Monitor::hold() {
  const std::lock_guard lock(mutex_);
  return count_in(holds_, mutex_);
}

std::shared_ptr<void> Monitor::close() {
  const std::lock_guard lock(mutex_);
  if (closes_ == 0) closes_since_ = Clock::now();
  return count_in(closes_, mutex_);
}

void Monitor::give_up() {
  const std::lock_guard lock(mutex_);
  if (thrown_) return;
  thrown_ = true;
  if (peers_ && !verdict_) peers_->report_failure("its own message says why");
}

void Monitor::write_record(const std::string& reason) noexcept {
  if (options_.trace_folder.empty()) return;
  try {
    const std::lock_guard lock(writing_);
    if (written_) return;  // that of the failure stays
    written_ = reason != kAsked;
    writer_.write(to_json(recorder_.record(reason)));
  } catch (const std::exception& error) {
    log_warning("[comm.flight_record] not written: {}", error.what());
  }
}

void Monitor::hear(const Verdict& verdict) {
  {
    const std::lock_guard lock(mutex_);
    if (verdict_) return;
    verdict_ = verdict;
    heard_at_ = Clock::now();
  }
  write_record(verdict.text);  // before the calls that are broken off look like ended ones
  heard_.notify_all();
  if (break_off_) break_off_();
}

void Monitor::tick() {
  if (const uint64_t seen = signals.load(); seen != signals_seen_) {
    signals_seen_ = seen;
    if (options_.trace_folder.empty())
      log_warning("[comm.flight_record] SIGUSR2: no folder to write to. Set TESSERA_TRACE_DIR.");
    write_record(kAsked);
  }
  finish_what_ran();
  report_overdue();
  end_process_when_due();
}

void Monitor::report_overdue() {
  Trouble trouble;
  {
    const std::lock_guard lock(in_flight_mutex_);
    if (overdue_reported_) return;
    const auto now = Clock::now();
    const auto late = std::find_if(in_flight_.begin(), in_flight_.end(), [&](const InFlight& one) {
      return now - one.started > options_.timeout + kOverdue && !one.work->isCompleted();
    });
    if (late == in_flight_.end()) return;
    overdue_reported_ = true;
    trouble = {.group = late->group,
               .sequence = late->sequence,
               .text = fmt::format("timed out after {} s", options_.timeout.count() / 1000),
               .timed_out = true};
  }
  const std::lock_guard lock(mutex_);
  if (peers_) peers_->report_trouble(trouble);
}

void Monitor::end_process_when_due() {
  std::optional<Verdict> verdict;
  bool closes = false;
  {
    const std::lock_guard lock(mutex_);
    if (!options_.ends_process || !verdict_) return;
    const auto now = Clock::now();
    const auto limit = [this](auto usual) { return holds_ > 0 ? kLongestHold : usual; };
    closes = closes_ > 0 && now - std::max(heard_at_, closes_since_) > limit(kLongestClose);
    const bool unheard = !thrown_ && now - heard_at_ >= limit(kGrace);
    if (!closes && !unheard) return;
    verdict = verdict_;
  }
  end_process(*verdict, closes ? "Its connections do not close, and this rank is ended."
                               : "This rank has made no collective since that could have told it, and is ended.");
}

void Monitor::end_process(const Verdict& verdict, const std::string& why) {
  const std::string text = fmt::format("[comm.watchdog] {}. {}", verdict.text, why);
  const std::unique_ptr<Error> error = verdict.consequence ? std::unique_ptr<Error>(std::make_unique<PeerFailed>(text))
                                                           : std::make_unique<Error>(ErrorKind::kComm, text);
  if (!report_error(*error)) {
    const std::string line = fmt::format("tessera: error: rank {}: {}\n", options_.rank, text);
    std::fputs(line.c_str(), stderr);
    std::fflush(stderr);  // a program may have given it a buffer
  }
  std::_Exit(error->exit_code());
}

}  // namespace tessera::comm
