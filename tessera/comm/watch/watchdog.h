// Watchdog: notices within seconds that a rank of another process has died, and finds out why ranks wait for one
// another.
//
//   auto watchdog = start_watchdog(store, {.rank = 0, .size = 4, .address = "127.0.0.1"}, listener);   // COLLECTIVE
//
// Rank 0 is the hub. Every other rank has a TCP connection to the hub, over which both send a ping once a second.
// A rank that leaves in an orderly way sends a last frame (kBye). A rank counts as dead when its connection ends
// without this frame, or when no frame arrives for `silence`; the hub then reports its death to all ranks. When a
// rank reports a failed collective, the hub collects the flight records of all ranks, finds the cause, and sends
// the failure report to all (docs/design/watchdog.md). A thread of its own serves the connection, so that pings
// are sent while the rank computes. Thread-safe.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tessera/base/machine/listen.h"
#include "tessera/comm/watch/failure_reporter.h"

namespace c10d {
class Store;
}

namespace tessera::comm {

struct WatchdogOptions {
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";                            // address of rank 0's host, as seen from this host
  ListenScope reach = ListenScope::kThisHost;                   // whether other ranks are on this host or on others
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // for all ranks to connect
  std::chrono::milliseconds silence = std::chrono::seconds(4);  // 0: a silent rank never counts as dead
  bool compare = true;                                          // compare flight records when a collective has failed
};

// Connects the watchdogs. COLLECTIVE over the ranks of `store`. `listener` must live until leave(), which the
// destructor of the result calls too. Error kComm when a rank does not connect in time. Returns null on all ranks, and
// rank 0 logs a warning, when rank 0 cannot listen or some rank cannot reach it.
std::unique_ptr<FailureReporter> start_watchdog(c10d::Store& store, const WatchdogOptions& options,
                                                FailureListener& listener);

}  // namespace tessera::comm
