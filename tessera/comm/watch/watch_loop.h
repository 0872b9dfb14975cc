// The watchdog's event loop, base class of both roles (watch_roles.h). A thread of its own serves the connections,
// sends the frames that other threads post, and sends pings. Internal to comm: start_watchdog() makes it.
//
//   class Spoke final : public WatchLoop { ... };
//   loop->admit(0, std::move(hub), {});
//   loop->begin();  loop->report_trouble(trouble);  loop->leave(false);
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
#include "tessera/comm/watch/peer_socket.h"
#include "tessera/comm/watch/peers.h"

namespace tessera::comm {

class WatchLoop : public Peers {
 public:
  // `silence`: time without a frame after which a peer counts as dead; 0: no limit. Error kIo when file descriptors run
  // out.
  WatchLoop(int rank, std::chrono::milliseconds silence, PeerListener& listener);

  // Adds the connection to a peer, and frames that have arrived on it already. To be called before begin().
  void admit(int rank, PeerSocket socket, std::vector<Frame> early);
  void begin();
  bool report_trouble(const Trouble& trouble) override;
  void report_failure(const std::string& text) override;
  bool hears_of_ends() const override { return true; }
  // Sends a bye unless `failed`, and ends the thread. The loop serves no connection after the bye: peers close their
  // end when they read it, and this rank would take that for their death.
  void leave(bool failed) noexcept override;

 protected:
  struct Peer {
    PeerSocket socket;
    std::chrono::steady_clock::time_point heard{};  // when data last arrived
    bool awaits_room = false;                       // epoll reports when the socket is writable
  };

  virtual void send_own(const Frame& frame) = 0;           // handles a frame posted by this rank
  virtual void receive(int from, const Frame& frame) = 0;  // handles a frame of a peer
  virtual void lose(int peer, bool silent) = 0;            // a connection has ended, or was silent for too long
  virtual void on_tick() {}

  void send(int peer, const Frame& frame);  // does nothing for a peer whose connection has ended
  void tell_all(const Frame& frame);        // sends a frame to all peers
  void drop(int peer) { peers_.erase(peer); }
  size_t peers() const { return peers_.size(); }
  void announce(const Verdict& verdict);  // gives the listener the failure report, once

  const int rank_;
  const std::chrono::milliseconds silence_;
  PeerListener& listener_;

 private:
  void post(FrameKind kind, std::string text);
  void wake() const;
  void run();
  void serve();
  void serve_peer(int rank, uint32_t events);
  void attend(int rank, Peer& peer, bool added);
  void ping_all();
  void check_silence();

  std::map<int, Peer> peers_;
  std::vector<std::pair<int, Frame>> early_;  // frames that arrived before begin()
  UniqueFd wake_, poll_;                      // an eventfd that wakes the loop, and the loop's epoll descriptor
  std::mutex mutex_;                          // guards `outbox_` and `stop_`
  std::vector<Frame> outbox_;                 // frames posted by other threads
  bool stop_ = false;
  bool heard_verdict_ = false;  // announce() was called
  std::chrono::steady_clock::time_point last_tick_{};
  std::thread thread_;
};

}  // namespace tessera::comm
