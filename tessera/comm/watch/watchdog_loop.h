// The watchdog's event loop, base class of both roles (watchdog_roles.h). A thread of its own serves the connections,
// sends the frames that other threads post, and sends pings. Internal to comm: start_watchdog() makes it.
//
//   class Spoke final : public WatchdogLoop { ... };
//   loop->add_peer(0, std::move(hub), {});
//   loop->begin();  loop->report_call_failure(failure);  loop->leave(false);
//
// The report functions are thread-safe. Only the owner's thread calls begin() and leave(). The protected virtual
// functions are called on the loop's thread. A derived class must call leave() in its destructor, before its virtual
// functions become unavailable.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/files/unique_fd.h"
#include "tessera/comm/watch/failure_reporter.h"
#include "tessera/comm/watch/peer_socket.h"

namespace tessera::comm {

class WatchdogLoop : public FailureReporter {
 public:
  // `silence`: time without a frame after which a peer counts as dead; 0: no limit. Error kIo when file descriptors run
  // out.
  WatchdogLoop(int rank, std::chrono::milliseconds silence, FailureListener& listener);

  // Adds the connection to a peer, and frames that have arrived on it already. To be called before begin().
  void add_peer(int rank, PeerSocket socket, std::vector<WatchdogFrame> early);
  void begin();
  bool report_call_failure(const CallFailure& failure) override;
  void report_rank_failure(const std::string& text) override;
  bool detects_dead_ranks() const override { return true; }
  // Sends the frame kBye to the peers unless `failed`, and ends the thread. After kBye the loop serves no connection: a
  // peer closes its connection when it reads kBye, and this rank would take the closed connection for the death of the
  // peer.
  void leave(bool failed) noexcept override;

 protected:
  struct Peer {
    PeerSocket socket;
    std::chrono::steady_clock::time_point heard{};  // when data last arrived
    bool waits_for_writable = false;                // epoll reports when the socket is writable
  };

  virtual void send_own(const WatchdogFrame& frame) = 0;           // handles a frame posted by this rank
  virtual void receive(int from, const WatchdogFrame& frame) = 0;  // handles a frame of a peer
  virtual void on_lost_peer(int peer, bool silent) = 0;            // a connection has ended, or was silent for too long
  virtual void on_tick() {}

  void send(int peer, const WatchdogFrame& frame);  // does nothing for a peer whose connection has ended
  void send_to_all(const WatchdogFrame& frame);     // sends a frame to all peers
  void drop(int peer) { peers_.erase(peer); }
  size_t peers() const { return peers_.size(); }
  void deliver_report(const FailureReport& report);  // gives the listener the failure report, once

  const int rank_;
  const std::chrono::milliseconds silence_;
  FailureListener& listener_;

 private:
  void post(WatchdogFrameKind kind, std::string text);
  void wake() const;
  void run();
  void serve();
  void serve_peer(int rank, uint32_t events);
  void register_with_epoll(int rank, Peer& peer, bool added);
  void ping_all();
  void check_silence();

  std::map<int, Peer> peers_;
  std::vector<std::pair<int, WatchdogFrame>> early_;  // frames that arrived before begin()
  UniqueFd wake_, poll_;                              // an eventfd that wakes the loop, and the loop's epoll descriptor
  std::mutex mutex_;                                  // guards `outbox_` and `stop_`
  std::vector<WatchdogFrame> outbox_;                 // frames posted by other threads
  bool stop_ = false;
  bool report_delivered_ = false;  // deliver_report() was called
  std::chrono::steady_clock::time_point last_tick_{};
  std::thread thread_;
};

}  // namespace tessera::comm
