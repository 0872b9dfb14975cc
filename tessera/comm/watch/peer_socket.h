// The connection between the watchdogs of two ranks: frames over TCP (docs/format/watchdog.md). Internal to comm.
//
//   std::string reason;
//   PeerSocket hub = connect_to("127.0.0.1", 4711, deadline, reason);
//   hub.send({.kind = WatchdogFrameKind::kPing, .rank = 3});
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

enum class WatchdogFrameKind : uint32_t {
  kHello = 1,
  kPing,
  kBye,
  kFailed,
  kCallFailure,
  kRecordRequest,
  kRecord,
  kFailureReport
};

struct WatchdogFrame {
  WatchdogFrameKind kind = WatchdogFrameKind::kPing;
  int32_t rank = -1;   // of the sender
  std::string text{};  // at most 1 MiB; longer text is cut
};

using PeerDeadline = std::chrono::steady_clock::time_point;

// Waits until poll(2) reports one of `events`, an error or an end on the descriptor. Returns false at the deadline.
bool wait_until_ready(int descriptor, short events, PeerDeadline deadline);

// A connected, non-blocking TCP socket with buffers for both directions.
class PeerSocket {
 public:
  explicit PeerSocket(UniqueFd socket = UniqueFd());

  int descriptor() const { return socket_.get(); }
  bool open() const { return socket_.open(); }
  void close() noexcept { socket_.reset(); }
  UniqueFd release() noexcept { return std::move(socket_); }
  // Closes the connection after the last send(): waits until the peer has read everything and has closed its end, or
  // until the deadline. close() alone would discard sent data that the peer has not read, if unread data of the peer is
  // in the receive buffer (TCP reset).
  void finish(PeerDeadline deadline) noexcept;
  // Sends a frame without waiting. Data that the socket does not accept now is kept for flush(). Frames are sent whole
  // and in order. Returns false when the connection has ended, or when the peer has left more than 8 MiB unread: then
  // the connection is ended.
  bool send(const WatchdogFrame& frame) noexcept;
  bool flush() noexcept;
  // Whether send() has kept data for flush(), which is to be called when descriptor() is writable.
  bool has_unsent() const { return open() && sent_ < outgoing_.size(); }
  // Waits for the next frames. Returns none when the deadline passes or the connection ends first.
  std::vector<WatchdogFrame> await(PeerDeadline deadline);
  // Appends to `frames` the frames that have arrived whole since the last call; does not wait for more. Returns false
  // when the connection has ended, or when the peer has sent data that is not a frame.
  bool receive(std::vector<WatchdogFrame>& frames);

 private:
  UniqueFd socket_;
  std::string incoming_, outgoing_;
  size_t sent_ = 0;  // number of bytes of outgoing_ that were sent
};

// Accepts connections and waits for their first frame. A connection that sends nothing does not delay the others. It is
// closed after 5 s, or earlier when file descriptors or the 1,024 places for such connections run out.
class ConnectionAcceptor {
 public:
  explicit ConnectionAcceptor(UniqueFd listener);
  // Returns the next connection that has sent a frame, with its first frames; a closed socket at the deadline.
  std::pair<PeerSocket, std::vector<WatchdogFrame>> next(PeerDeadline deadline);

 private:
  struct PendingConnection {
    PeerSocket socket;
    PeerDeadline patience;  // time limit for its first frame
  };
  void accept_connection();
  UniqueFd listener_;
  std::list<PendingConnection> pending_;  // oldest first
  PeerDeadline full_until_{};             // descriptors ran out: accept() is not tried before this time
};

// Connects, in one attempt per address of the host. Returns a closed socket and `reason` when there is no connection by
// the deadline.
PeerSocket connect_to(const std::string& host, int port, PeerDeadline deadline, std::string& reason);

}  // namespace tessera::comm
