// How a rank hears what became of the others. Internal to comm.
//
//   peers->report_trouble({.group = id, .sequence = 7, .text = "rank 0 timed out after 300 s"});
//   ...                                       // every rank's PeerListener hears the one verdict
//
// Two kinds: a WatchLoop between processes, ThreadPeers inside one. Both are thread-safe.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

// Why the ranks of a world cannot go on; the same on all of them.
struct Verdict {
  std::string text;          // one line, no full stop
  int culprit = -1;          // global rank; -1: none alone
  bool consequence = false;  // of a rank that ended: not the first error of the run
};

// A collective that does not end, or ended badly for no reason of this rank's own.
struct Trouble {
  uint32_t group = 0;
  uint64_t sequence = 0;
  std::string text;        // what this rank saw
  bool timed_out = false;  // then the verdict is an error on its own, else the consequence of some rank's end
};

// As text, for the frames of a watchdog (docs/format/watchdog.md). Parsing: Error for a text that is none.
std::string to_text(const Trouble& trouble);
std::string to_text(const Verdict& verdict);
Trouble parse_trouble(const std::string& text, int from);
Verdict parse_verdict(const std::string& text);

// Throws `before` and the verdict: PeerFailed for a consequence, else Error kComm.
[[noreturn]] void throw_verdict(const Verdict& verdict, const std::string& before);

// One rank, as its peers see it. Called from other threads.
class PeerListener {
 public:
  virtual ~PeerListener() = default;
  virtual FlightRecord where(uint32_t group, uint64_t sequence) = 0;
  virtual void hear(const Verdict& verdict) = 0;  // at most once
  virtual void tick() {}                          // twice a second, from a watchdog's thread
};

class Peers {
 public:
  virtual ~Peers() = default;
  // Both return at once. The verdict follows within 3 s: the first one reached is the one. False: none will.
  virtual bool report_trouble(const Trouble& trouble) = 0;
  virtual void report_failure(const std::string& text) = 0;
  // Whether a verdict comes by itself when a rank has ended.
  virtual bool hears_of_ends() const = 0;
  // Ends the watch over this rank: its listener is not called after it. Not after a failure: without error.
  virtual void leave(bool failed) noexcept = 0;
};

// From what the ranks say, for `trouble` seen by `rank`. An empty text: nothing can be said.
Verdict judge(const std::vector<FlightRecord>& records, const std::set<int>& left, const Trouble& trouble, int rank);

}  // namespace tessera::comm
