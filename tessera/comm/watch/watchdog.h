// Notices within seconds that a rank of another process has died, and finds out why ranks wait for one another.
//
//   auto watchdog = start_watchdog(store, {.rank = 0, .size = 4, .address = "127.0.0.1"}, listener);   // COLLECTIVE
//
// Rank 0 is the hub: every other rank holds a connection to it, over which both say once a second that they live.
// A connection that ends without a farewell, or is silent for `silence`, is a dead rank; the hub tells all others. The
// hub also asks every rank where it is when one reports trouble, and passes the verdict (docs/design/watchdog.md).
// A thread of its own serves the connection, so that a rank is heard while it computes. Thread-safe.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tessera/base/machine/listen.h"
#include "tessera/comm/watch/peers.h"

namespace c10d {
class Store;
}

namespace tessera::comm {

struct WatchdogOptions {
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";                            // of rank 0's host, as it is called on this one
  Reach reach = Reach::kThisHost;                               // where the other ranks are
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // until all ranks are connected
  std::chrono::milliseconds silence = std::chrono::seconds(4);  // 0: a silent rank is not a dead one
  bool compare = true;                                          // ask the ranks where they are when one reports trouble
};

// COLLECTIVE over the ranks of `store`. `listener` must live until leave(), which the end of the result calls if that
// was not done. Error kComm when a rank does not come; null on all ranks, with a warning of one, when rank 0 cannot
// listen or cannot be reached by all.
std::unique_ptr<Peers> start_watchdog(c10d::Store& store, const WatchdogOptions& options, PeerListener& listener);

}  // namespace tessera::comm
