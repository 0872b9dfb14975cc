// Frames between the watchdogs of two ranks, over TCP (docs/format/watchdog.md). Internal to comm.
//
//   std::string reason;
//   PeerSocket hub = connect_to("127.0.0.1", 4711, deadline, reason);
//   hub.send({.kind = FrameKind::kPing, .rank = 3});
//
// Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

enum class FrameKind : uint32_t { kHello = 1, kPing, kBye, kFailed, kTrouble, kAsk, kStatus, kVerdict };

struct Frame {
  FrameKind kind = FrameKind::kPing;
  int32_t rank = -1;
  std::string text{};
};

using PeerDeadline = std::chrono::steady_clock::time_point;

// Until poll(2) tells one of `events`, or an end, of the descriptor; false at the deadline.
bool wait_until_ready(int descriptor, short events, PeerDeadline deadline);

// A connected stream socket.
class PeerSocket {
 public:
  explicit PeerSocket(UniqueFd socket = UniqueFd());

  int descriptor() const { return socket_.get(); }
  bool open() const { return socket_.open(); }
  void close() noexcept { socket_.reset(); }
  UniqueFd release() noexcept { return std::move(socket_); }
  // After the last send(): closes once the other end has read everything and closed too, or at the deadline. A close
  // alone would throw away what the other end has not read yet when something from it lies unread here.
  void finish(PeerDeadline deadline) noexcept;
  // Does not wait: what the other end does not take now is kept, whole frames in their order, for flush(). False: the
  // other end is gone, or has left 8 MiB unread and counts as gone.
  bool send(const Frame& frame) noexcept;
  bool flush() noexcept;
  // Something waits for descriptor() to be writable, and then for flush().
  bool has_unsent() const { return open() && sent_ < outgoing_.size(); }
  // The next frames, at least one; none when the deadline passes or the other end goes first.
  std::vector<Frame> await(PeerDeadline deadline);
  // Appends what has arrived; does not block. False: the other end is gone, or what it sent are no frames.
  bool receive(std::vector<Frame>& frames);

 private:
  UniqueFd socket_;
  std::string incoming_, outgoing_;
  size_t sent_ = 0;  // of outgoing_
};

// Connections of those who have yet to say who they are. One that says nothing holds up nobody else, and is closed
// after a while or when there are no descriptors left for others.
class Reception {
 public:
  explicit Reception(UniqueFd listener);
  // The next one that has spoken, and its first frames, at least one; not open when there is none until the deadline.
  std::pair<PeerSocket, std::vector<Frame>> next(PeerDeadline deadline);

 private:
  struct Guest {
    PeerSocket socket;
    PeerDeadline patience;
  };
  void let_in();
  UniqueFd listener_;
  std::list<Guest> guests_;    // oldest first
  PeerDeadline full_until_{};  // no descriptor was left: accept() would only say so again
};

// Not open, and why, when nobody can be reached there until the deadline; tries once.
PeerSocket connect_to(const std::string& host, int port, PeerDeadline deadline, std::string& reason);

}  // namespace tessera::comm
