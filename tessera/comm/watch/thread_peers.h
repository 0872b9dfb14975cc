// The ranks that are threads of this process, as each other's peers: what a WatchLoop is between processes, without
// sockets, since a thread cannot die alone. Internal to comm.
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

// What the ranks share.
struct ThreadRoom {
  std::mutex mutex;  // of what follows; held while listeners are called, so that leave() waits for them
  std::map<int, PeerListener*> present;
  std::set<int> left;
  bool settled = false;
};

class ThreadPeers final : public Peers {
 public:
  ThreadPeers(std::shared_ptr<ThreadRoom> room, int rank, PeerListener& listener);
  ~ThreadPeers() override { leave(false); }
  bool report_trouble(const Trouble& trouble) override;
  void report_failure(const std::string&) override {}  // whoever started the threads breaks them off
  bool hears_of_ends() const override { return false; }
  void leave(bool failed) noexcept override;

 private:
  std::shared_ptr<ThreadRoom> room_;
  const int rank_;
};

}  // namespace tessera::comm
