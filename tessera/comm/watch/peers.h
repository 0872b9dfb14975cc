// The connection of a rank to the other ranks for failure reports. Internal to comm.
//
//   peers->report_trouble({.group = id, .sequence = 7, .text = "timed out after 300 s"});
//   ...                                       // then every rank's PeerListener receives the same Verdict
//
// There are two implementations: WatchLoop between processes, ThreadPeers inside a process. Both are thread-safe.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

// The failure report: why the ranks of a world cannot continue. All ranks receive the same report.
struct Verdict {
  std::string text;          // one line, no full stop
  int culprit = -1;          // global rank that is the cause; -1: no single rank
  bool consequence = false;  // a rank has ended, so the first error of the run is that rank's
};

// A rank's report of a collective that does not end, or that failed for no reason of this rank.
struct Trouble {
  uint32_t group = 0;      // Signature::members
  uint64_t sequence = 0;   // number of the call in the group
  std::string text;        // the error that this rank observed
  bool timed_out = false;  // the failure report is then an error of its own, otherwise the consequence of a rank's end
};

// Conversion to and from JSON, for the frames of a watchdog (docs/format/watchdog.md). Parsing throws Error kComm.
std::string to_text(const Trouble& trouble);
std::string to_text(const Verdict& verdict);
Trouble parse_trouble(const std::string& text, int from);
Verdict parse_verdict(const std::string& text);

// Throws the failure report with the prefix `before`: PeerFailed for a consequence, otherwise Error kComm.
[[noreturn]] void throw_verdict(const Verdict& verdict, const std::string& before);

// The interface of one rank that its Peers object calls, from other threads.
class PeerListener {
 public:
  virtual ~PeerListener() = default;
  // Returns a short flight record that shows this rank's state with regard to call `sequence` of a group.
  virtual FlightRecord where(uint32_t group, uint64_t sequence) = 0;
  virtual void hear(const Verdict& verdict) = 0;  // receives the failure report; called at most once
  virtual void tick() {}                          // called twice a second, from a watchdog's thread
};

class Peers {
 public:
  virtual ~Peers() = default;
  // Reports a failed collective. Returns at once; the failure report follows within 3 s. The first report that is made
  // is the only one. Returns false when none will follow.
  virtual bool report_trouble(const Trouble& trouble) = 0;
  // Reports that this rank ends with an error. Returns at once.
  virtual void report_failure(const std::string& text) = 0;
  // Whether a failure report comes without a call of report_trouble() when a rank has ended.
  virtual bool hears_of_ends() const = 0;
  // Disconnects this rank: its listener is not called any more. With `failed`, the other ranks see this as a failure,
  // otherwise as a regular end.
  virtual void leave(bool failed) noexcept = 0;
};

// Makes the failure report from the ranks' flight records, for `trouble` that `rank` has reported.
Verdict judge(const std::vector<FlightRecord>& records, const std::set<int>& left, const Trouble& trouble, int rank);

}  // namespace tessera::comm
