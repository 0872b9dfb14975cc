// Monitors the collectives of one rank: records them in the flight recorder, reports failures to the other ranks, and
// receives the common failure report (FailureReport in failure_reporter.h). There is one Monitor per World. Internal to
// comm.
//
//   const uint64_t ticket = monitor->start(signature);        // a collective begins
//   monitor->track_work(ticket, signature, work);             // the back-end has started it
//   monitor->wait(ticket);  ...  monitor->finish(ticket);
//
// The start of a device's collective may block. Its wait only orders the device's stream, so its end is observed later:
//
//   monitor->before_device_start(ticket, signature);
//   monitor->after_device_start(ticket, backend.allreduce(tensors));
//   monitor->wait(ticket);  ...  monitor->detach_to_device(ticket);
//
// A failure report means that a rank died, that ranks made different calls, or that a collective timed out. It makes
// the world unusable:
// - All groups of the rank are aborted, so that its waits end with an error.
// - The flight record is written, on a thread of its own, because a file system may hang.
// - A rank that is in no collective throws the error at its next collective.
// The process is ended with exit code 4, if MonitorOptions::ends_process is set, in three cases: the rank starts no
// collective within kGrace; the destruction of an aborted group takes longer than kLongestClose; or the wait for an
// aborted collective takes longer than kLongestClose. While hold() is in force the limit is kLongestHold instead.
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

#include "tessera/comm/watch/failure_reporter.h"
#include "tessera/comm/watch/flight_recorder.h"
#include "tessera/comm/watch/record_writer.h"

namespace c10d {
class Work;
}

namespace tessera::comm {

// When ranks compare the signatures of their calls: never, after a collective has timed out, or before each collective
// moves data.
enum class CheckMode : uint8_t { kOff, kTimeout, kAlways };
CheckMode parse_check_mode(std::string_view name);  // Error kConfig

struct MonitorOptions {
  int rank = 0;
  int size = 1;
  CheckMode check = CheckMode::kTimeout;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  std::filesystem::path trace_folder{};  // folder of this run's flight records; empty: none are written
  bool ends_process = false;             // end the process in the cases above
  RecordWriter::Publish publish{};       // for tests
};

class Monitor final : public FailureListener {
 public:
  static constexpr std::chrono::milliseconds kGrace{3000};  // for a rank to throw the error, after the failure report
  static constexpr std::chrono::milliseconds kLongestHold = std::chrono::minutes(10);  // replaces the others in hold()
  static constexpr std::chrono::milliseconds kLongestClose{8000};  // for an aborted group or collective to end
  static constexpr std::chrono::milliseconds kPatience{2000};      // for works that a failing rank abandons

  explicit Monitor(MonitorOptions options);
  ~Monitor() override;

  const MonitorOptions& options() const { return options_; }
  FlightRecorder& recorder() { return recorder_; }
  // Sets the function that aborts all groups. It is called once, from any thread, when the failure report arrives. To
  // be set before set_reporter().
  void set_abort_groups(std::function<void()> abort_groups) { abort_groups_ = std::move(abort_groups); }
  // Sets the connection to the other ranks.
  void set_reporter(std::unique_ptr<FailureReporter> reporter);
  // Ends the connection to the other ranks; `abort_groups` is not called after leave(). `failed`: this rank ends with
  // an error.
  void leave(bool failed) noexcept;

  uint64_t start(const Signature& signature) { return recorder_.start(signature); }
  // Registers the work of a started call as under way.
  void track_work(uint64_t ticket, const Signature& signature, c10::intrusive_ptr<c10d::Work> work);
  // To be called before and after the start of a collective or message on a device. Between the two calls the state of
  // this collective or message is CallState::kWaiting, because its start may block this rank. before_device_start()
  // throws Error kComm when an earlier collective or message is known to have failed on the device. An empty `work`
  // means that the back-end returned no work, so that there is nothing to wait for.
  void before_device_start(uint64_t ticket, const Signature& signature);
  void after_device_start(uint64_t ticket, c10::intrusive_ptr<c10d::Work> work);
  // Called when the back-end has refused a call: the call then no longer counts as under way.
  void untrack(uint64_t ticket);
  void wait(uint64_t ticket) { recorder_.mark(ticket, CallState::kWaiting); }
  void finish(uint64_t ticket);
  // To be called for a collective or message on a device when Work::wait() has ordered the current stream after it. The
  // call counts as under way until its end is observed: by tick(), when a flight record is made, or by
  // before_device_start() when search_at_size_ or more calls are under way. Rethrows the error when the call has failed
  // already.
  void detach_to_device(uint64_t ticket);
  // Reports a failed call to the peers and waits up to 4 s for the common failure report; nullopt when none comes.
  // Writes the flight record.
  std::optional<FailureReport> fail(uint64_t ticket, const CallFailure& failure);
  // Returns the failure report, or nullopt when there is none. Waits for it up to `limit` if the FailureReporter
  // detects dead ranks. Call it after an error outside a collective, because the cause of the error may be a rank that
  // has ended.
  std::optional<FailureReport> wait_for_failure_report(std::chrono::milliseconds limit);
  // Returns the failure report, if it has arrived. This call does not count as throwing the error: a rank that makes no
  // other call is still ended after kGrace (if MonitorOptions::ends_process is set).
  std::optional<FailureReport> failure_report();
  // Like fail(), but sends `message`, the reason of the failure, to the other ranks and does not wait for a failure
  // report.
  void fail_with(uint64_t ticket, const std::string& message);
  // While the returned handle lives, the limits after which the process is ended are kLongestHold: for work that must
  // not be cut off and needs no peer, such as publishing a checkpoint.
  std::shared_ptr<void> hold();
  // While the returned handle lives, a thread of this rank is destroying a back-end. After a rank has died, Gloo
  // occasionally never returns from this destruction. The monitor therefore ends the process kLongestClose after the
  // failure report, or after the handle was returned if that was later.
  std::shared_ptr<void> close();
  // Reports to the other ranks that this rank has failed by itself and is about to abort its collectives.
  void report_own_failure();
  // Returns the time until which a rank that abandons its calls because of an exception waits for the works of these
  // calls: kPatience after the first call of this function. All works share this limit, so waiting for many works does
  // not take longer than waiting for one.
  std::chrono::steady_clock::time_point abandon_deadline();
  // To be called after the groups of this rank were aborted: ends the messages of CPU tensors that are under way
  // (end_broken_message.h); later ones end when they are waited for. May be called from any thread.
  void end_messages() noexcept;
  bool is_aborted() const { return aborted_.load(std::memory_order_relaxed); }
  // Starts to write the present flight record into the trace folder. Errors are logged.
  void write_record(const std::string& reason) noexcept;

  // The functions of FailureListener.
  FlightRecord recent_calls(uint32_t group, uint64_t sequence) override;
  void on_failure_report(const FailureReport& report) override;
  void tick() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct TrackedCall {
    uint64_t ticket;
    uint32_t group;
    uint64_t sequence;
    Clock::time_point started;
    c10::intrusive_ptr<c10d::Work> work;  // empty: the call is still in its start
    bool detached;                        // detach_to_device() was called
    bool message_of_host = false;         // a send or recv of CPU tensors
  };
  void record_ended_calls();  // the caller holds in_flight_mutex_
  bool record_if_ended(const TrackedCall& one);
  CallFailure failed_on_device(const TrackedCall& one, const std::exception_ptr& failure) const;
  void report(const CallFailure& failure);
  void report_failed();
  void report_overdue();
  void end_process_when_due();
  [[noreturn]] void end_process(const FailureReport& report, const std::string& why);
  void release(uint64_t ticket);

  const MonitorOptions options_;
  FlightRecorder recorder_;
  std::unique_ptr<FailureReporter> reporter_;
  std::function<void()> abort_groups_;
  uint64_t signals_seen_;

  static constexpr size_t kSearchAtSize = 64;
  std::mutex in_flight_mutex_;  // guards the members up to overdue_reported_
  std::vector<TrackedCall> in_flight_;
  size_t search_at_size_ = kSearchAtSize;  // size of in_flight_ at which before_device_start() looks for ended calls
  std::optional<CallFailure> failure_;  // first failure of a device's call that was observed after detach_to_device()
  bool failure_reported_ = false;
  bool overdue_reported_ = false;

  std::atomic<bool> aborted_{false};

  std::mutex mutex_;  // guards the members up to abandon_deadline_
  std::condition_variable heard_;
  std::optional<FailureReport> report_;
  Clock::time_point report_time_{};       // when `report_` arrived
  bool rank_has_failed_ = false;          // the rank's own thread has thrown, or is about to throw, an error
  int holds_ = 0;                         // living handles of hold()
  int closes_ = 0;                        // living handles of close()
  Clock::time_point closes_since_{};      // when `closes_` became positive
  Clock::time_point abandon_deadline_{};  // zero: abandon_deadline() has not been called
  std::mutex writing_;                    // guards `written_`
  bool written_ = false;                  // the record of a failure was written; later ones must not replace it
  RecordWriter writer_;
  std::thread abort_thread_;  // calls abort_groups_ while a device's call blocks in its start
};

// Makes SIGUSR2 write the flight records of this process's ranks, unless the program handles the signal itself.
void write_records_on_signal();

}  // namespace tessera::comm
