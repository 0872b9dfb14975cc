// The connection of a rank to the other ranks for failure reports. Internal to comm.
//
//   reporter->report_call_failure({.group = id, .sequence = 7, .text = "timed out after 300 s"});
//   ...                                       // then every rank's FailureListener receives the same FailureReport
//
// There are two implementations: WatchdogLoop between processes, ThreadFailureReporter inside a process. Both are
// thread-safe.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

// The failure report: why the ranks of a world cannot continue. All ranks receive the same report.
struct FailureReport {
  std::string text;             // one line, no full stop
  int culprit = -1;             // global rank that is the cause; -1: no single rank
  bool is_consequence = false;  // a rank has ended, so the first error of the run is that rank's
};

// A rank's report of a collective that does not end, or that failed for a reason outside this rank.
struct CallFailure {
  uint32_t group = 0;      // Signature::members
  uint64_t sequence = 0;   // number of the call in the group
  std::string text;        // the error that this rank observed
  bool timed_out = false;  // the failure report is then an error of its own, otherwise the consequence of a rank's end
};

// Conversion to and from JSON, for the frames of a watchdog (docs/format/watchdog.md). Parsing throws Error kComm.
std::string to_text(const CallFailure& failure);
std::string to_text(const FailureReport& report);
CallFailure parse_call_failure(const std::string& text, int from);
FailureReport parse_failure_report(const std::string& text);

// Throws the failure report with the prefix `before`: PeerFailed for a consequence, otherwise Error kComm.
[[noreturn]] void throw_failure_report(const FailureReport& report, const std::string& before);

// The functions of a rank that a FailureReporter calls, for example to deliver the failure report to the rank.
// WatchdogLoop calls them from its own thread; ThreadFailureReporter calls them for all ranks of the process from the
// thread that called report_call_failure(). An implementation must be thread-safe.
class FailureListener {
 public:
  virtual ~FailureListener() = default;
  // Returns a short flight record that shows this rank's state with regard to call `sequence` of a group.
  virtual FlightRecord recent_calls(uint32_t group, uint64_t sequence) = 0;
  virtual void on_failure_report(const FailureReport& report) = 0;  // receives the failure report; called at most once
  virtual void tick() {}                                            // called twice a second, from a watchdog's thread
};

class FailureReporter {
 public:
  virtual ~FailureReporter() = default;
  // Reports a failed collective. Returns at once: true when a failure report follows within 3 s (or has been made
  // already), false when none will follow. A world has at most one failure report, however many failures its ranks
  // report.
  virtual bool report_call_failure(const CallFailure& failure) = 0;
  // Reports that this rank ends with an error. Returns at once.
  virtual void report_rank_failure(const std::string& text) = 0;
  // Whether a failure report is made when a rank has ended, even if no rank calls report_call_failure().
  virtual bool detects_dead_ranks() const = 0;
  // Disconnects this rank: its listener is not called any more. With `failed`, the other ranks see this as a failure,
  // otherwise as a regular end.
  virtual void leave(bool failed) noexcept = 0;
};

// Makes the failure report from the ranks' flight records, for `failure` that `rank` has reported.
FailureReport make_failure_report(const std::vector<FlightRecord>& records, const std::set<int>& left,
                                  const CallFailure& failure, int rank);

}  // namespace tessera::comm
