// What one rank knows and hears about its collectives: flight recorder, peers, verdict. One a World. Internal to comm.
//
//   const uint64_t ticket = monitor->start(signature);        // a collective begins
//   monitor->carry(ticket, work);                             // its back-end has it
//   monitor->wait(ticket);  ...  monitor->finish(ticket);
//
// One of a device may block in its start, and is left to the device when it is waited for:
//
//   monitor->begin_on_device(ticket, signature);
//   monitor->begun_on_device(ticket, backend.allreduce(tensors));
//   monitor->wait(ticket);  ...  monitor->leave_running(ticket);
//
// Once a verdict is there (a peer died, ranks disagree, a collective timed out) the world is broken: its groups are
// broken off, so that whatever this rank waits for ends, and flight records are written, by a thread of their own: no
// file system holds that up. A rank that is in no collective hears of it at its next one; if there is none within
// kGrace, and the options say so, its process is ended with exit code 4, though not while it holds that off. So is one
// that cannot get rid of a broken group, or waits for a call that does not end though it is broken off, for
// kLongestClose.
// Thread-safe.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tessera/comm/watch/flight_recorder.h"
#include "tessera/comm/watch/peers.h"
#include "tessera/comm/watch/record_writer.h"

namespace c10d {
class Work;
}

namespace tessera::comm {

// When ranks compare what they called: never, when a collective times out, or before each one moves data.
enum class CheckMode : uint8_t { kOff, kTimeout, kAlways };
CheckMode parse_check_mode(std::string_view name);  // Error kConfig

struct MonitorOptions {
  int rank = 0;
  int size = 1;
  CheckMode check = CheckMode::kTimeout;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  std::filesystem::path trace_folder{};  // of this run's flight records; empty: none
  bool ends_process = false;
  RecordWriter::Publish publish{};  // for tests
};

class Monitor final : public PeerListener {
 public:
  static constexpr std::chrono::milliseconds kGrace{3000};
  static constexpr std::chrono::milliseconds kLongestHold = std::chrono::minutes(10);
  static constexpr std::chrono::milliseconds kLongestClose{8000};
  static constexpr std::chrono::milliseconds kPatience{2000};

  explicit Monitor(MonitorOptions options);
  ~Monitor() override;

  const MonitorOptions& options() const { return options_; }
  FlightRecorder& recorder() { return recorder_; }
  // `break_off` is called once, from any thread, when the verdict is there. To be set before there are peers.
  void on_verdict(std::function<void()> break_off) { break_off_ = std::move(break_off); }
  void attend(std::unique_ptr<Peers> peers);
  // Ends the watch; `break_off` does not run after it.
  void leave(bool failed) noexcept;

  uint64_t start(const Signature& signature) { return recorder_.start(signature); }
  void carry(uint64_t ticket, const Signature& signature, c10::intrusive_ptr<c10d::Work> work);
  // Around the start of a device's call, which counts as a wait. Throws Error kComm when an earlier one is known to
  // have failed on the device. Work may be empty: there is nothing to carry.
  void begin_on_device(uint64_t ticket, const Signature& signature);
  void begun_on_device(uint64_t ticket, c10::intrusive_ptr<c10d::Work> work);
  // The back-end has refused the call: it is not under way.
  void withdraw(uint64_t ticket);
  void wait(uint64_t ticket) { recorder_.mark(ticket, CallState::kWaiting); }
  void finish(uint64_t ticket);
  // Ordered on a device's stream: its end is seen later, by tick(), when a record is made and, every so many calls, by
  // a further one. Until then it counts as under way. Throws what it has failed with already.
  void leave_running(uint64_t ticket);
  // A call ended badly. The verdict, for which it waits up to 4 s; nothing when nobody can say. Writes the flight
  // record.
  std::optional<Verdict> fail(uint64_t ticket, const Trouble& trouble);
  // What ended a rank, if that is heard of within `limit`; for a failure that is no collective's own, which it may
  // explain.
  std::optional<Verdict> await_verdict(std::chrono::milliseconds limit);
  // The verdict, if there is one yet. It does not count as heard.
  std::optional<Verdict> verdict();
  // The same as fail() when the reason is known here: the others hear it.
  void fail_with(uint64_t ticket, const std::string& message);
  // While what it returns lives, the process is not ended for want of a collective (ends_process), at most kLongestHold
  // after the verdict: for work that must not be cut off and needs no peer.
  std::shared_ptr<void> hold();
  // While what it returns lives, this thread waits for a back-end to end. Gloo now and then never does after a peer
  // died: when that has taken kLongestClose after a verdict, the process is ended (ends_process), unless it holds that
  // off.
  std::shared_ptr<void> close();
  // This rank is about to break off what it has in flight, because it failed on its own account.
  void give_up();
  // Until when a rank that has given up waits for what it has in flight: kPatience from the first time that it asks, so
  // that many calls cost it no more than one.
  std::chrono::steady_clock::time_point end_of_patience();
  // The groups of this rank have been broken off: messages of the host under way end now, others when they are waited
  // for. From any thread.
  void end_messages() noexcept;
  bool is_broken_off() const { return broken_off_.load(std::memory_order_relaxed); }
  // Begins to write the flight record, of this moment, into the trace folder. Failures are logged.
  void write_record(const std::string& reason) noexcept;

  FlightRecord where(uint32_t group, uint64_t sequence) override;
  void hear(const Verdict& verdict) override;
  void tick() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct InFlight {
    uint64_t ticket;
    uint32_t group;
    uint64_t sequence;
    Clock::time_point started;
    c10::intrusive_ptr<c10d::Work> work;  // empty: it blocks in its start
    bool left_running;
    bool message_of_host = false;
  };
  void settle_what_ran();  // the caller holds in_flight_mutex_
  bool settle(const InFlight& one);
  Trouble failed_on_device(const InFlight& one, const std::exception_ptr& failure) const;
  void report(const Trouble& trouble);
  void report_failed();
  void report_overdue();
  void end_process_when_due();
  [[noreturn]] void end_process(const Verdict& verdict, const std::string& why);
  void release(uint64_t ticket);

  const MonitorOptions options_;
  FlightRecorder recorder_;
  std::unique_ptr<Peers> peers_;
  std::function<void()> break_off_;
  uint64_t signals_seen_;

  static constexpr size_t kSettleAt = 64;
  std::mutex in_flight_mutex_;  // of what follows
  std::vector<InFlight> in_flight_;
  size_t settle_at_ = kSettleAt;    // that many: look which of them have run
  std::optional<Trouble> failure_;  // the first of calls that were left to a device
  bool failure_reported_ = false;
  bool overdue_reported_ = false;

  std::atomic<bool> broken_off_{false};

  std::mutex mutex_;  // of what follows
  std::condition_variable heard_;
  std::optional<Verdict> verdict_;
  Clock::time_point heard_at_{};
  bool thrown_ = false;  // this rank's own thread knows
  int holds_ = 0;
  int closes_ = 0;
  Clock::time_point closes_since_{};
  Clock::time_point end_of_patience_{};
  std::mutex writing_;
  bool written_ = false;  // the record of the failure
  RecordWriter writer_;
  std::thread breaker_;
};

// From now on SIGUSR2 writes the flight records of this process's ranks, unless the program handles it itself.
void write_records_on_signal();

}  // namespace tessera::comm
