// What both kinds of rank do in a watch, on a thread of its own: serve connections, send what other threads want sent,
// keep time. Internal to comm: start_watchdog() makes it.
//
//   class Spoke final : public WatchLoop { ... };
//   loop->admit(0, std::move(hub), {});
//   loop->begin();  loop->report_trouble(trouble);  loop->leave(false);
//
// Reports are thread-safe; begin() and leave() belong to the owner; the protected virtual functions are called on the
// loop's thread. A derived class calls leave() in its destructor, while its own functions can still be called.
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
  // `silence` 0: a silent peer is not a dead one. Error kIo when the system gives no descriptors.
  WatchLoop(int rank, std::chrono::milliseconds silence, PeerListener& listener);

  // Before begin(): a connection, and what came with it.
  void admit(int rank, PeerSocket socket, std::vector<Frame> early);
  void begin();
  bool report_trouble(const Trouble& trouble) override;
  void report_failure(const std::string& text) override;
  bool hears_of_ends() const override { return true; }
  // Says farewell unless `failed`, and ends the thread. The bye is the last thing it does: peers close their end when
  // they read it, and a loop that still served them would take that for their death.
  void leave(bool failed) noexcept override;

 protected:
  struct Peer {
    PeerSocket socket;
    std::chrono::steady_clock::time_point heard{};
    bool awaits_room = false;  // epoll tells when its socket is writable
  };

  // From this rank's own threads, from a peer, and when a peer's connection has ended or fallen silent.
  virtual void send_own(const Frame& frame) = 0;
  virtual void receive(int from, const Frame& frame) = 0;
  virtual void lose(int peer, bool silent) = 0;
  virtual void on_tick() {}

  void send(int peer, const Frame& frame);  // nothing to one that is gone
  void tell_all(const Frame& frame);
  void drop(int peer) { peers_.erase(peer); }
  size_t peers() const { return peers_.size(); }
  void announce(const Verdict& verdict);

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
  std::vector<std::pair<int, Frame>> early_;
  UniqueFd wake_, poll_;  // an eventfd, and what waits for it and the connections
  std::mutex mutex_;
  std::vector<Frame> outbox_;
  bool stop_ = false;
  bool heard_verdict_ = false;
  std::chrono::steady_clock::time_point last_tick_{};
  std::thread thread_;
};

}  // namespace tessera::comm
