// Notices within seconds that a rank of another process has died, and finds out why ranks wait for one another.
//
//   auto watchdog = Watchdog::start(store, {.rank = 0, .size = 4, .address = "127.0.0.1"}, listener);   // COLLECTIVE
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

class WatchLoop;

struct WatchdogOptions {
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";                            // of rank 0's host, as it is called on this one
  Reach reach = Reach::kThisHost;                               // where the other ranks are
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // until all ranks are connected
  std::chrono::milliseconds silence = std::chrono::seconds(4);  // 0: a silent rank is not a dead one
  bool compare = true;                                          // ask the ranks where they are when one reports trouble
};

class Watchdog final : public Peers {
 public:
  // COLLECTIVE over the ranks of `store`. `listener` must live until leave(). Error kComm when a rank does not come;
  // null on all ranks, with a warning of one, when rank 0 cannot listen or cannot be reached by all.
  static std::unique_ptr<Watchdog> start(c10d::Store& store, const WatchdogOptions& options, PeerListener& listener);
  ~Watchdog() override;  // leaves, if that was not done

  bool report_trouble(const Trouble& trouble) override;
  void report_failure(const std::string& text) override;
  bool hears_of_ends() const override { return true; }
  void leave(bool failed) noexcept override;

 private:
  explicit Watchdog(std::unique_ptr<WatchLoop> loop);
  std::unique_ptr<WatchLoop> loop_;
};

}  // namespace tessera::comm
