// Peers for ranks that are threads of one process. The counterpart of WatchLoop without sockets and without a watch for
// deaths: a thread cannot die alone. Internal to comm.
//
//   auto room = std::make_shared<ThreadRoom>();
//   auto peers = std::make_unique<ThreadPeers>(room, rank, listener);
//
// Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "tessera/comm/watch/peers.h"

namespace tessera::comm {

// State that the ranks share.
struct ThreadRoom {
  std::mutex mutex;  // guards all members; held while listeners are called, so that leave() waits for the calls
  std::map<int, PeerListener*> present;  // by rank
  std::set<int> left;                    // ranks that have left
  bool settled = false;                  // the failure report has been made
};

class ThreadPeers final : public Peers {
 public:
  ThreadPeers(std::shared_ptr<ThreadRoom> room, int rank, PeerListener& listener);
  ~ThreadPeers() override { leave(false); }
  bool report_trouble(const Trouble& trouble) override;
  void report_failure(const std::string&) override {}  // run_thread_ranks() aborts the other ranks
  bool hears_of_ends() const override { return false; }
  void leave(bool failed) noexcept override;

 private:
  std::shared_ptr<ThreadRoom> room_;
  const int rank_;
};

}  // namespace tessera::comm
