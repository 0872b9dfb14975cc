// Frames between the watchdogs of two ranks, over TCP (docs/format/watchdog.md). Internal to comm.
//
//   PeerSocket hub = connect_to("127.0.0.1:4711", deadline);
//   hub.send({.kind = FrameKind::kPing, .rank = 3});
//
// Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::comm {

enum class FrameKind : uint32_t { kHello = 1, kPing, kBye, kFailed, kTrouble, kAsk, kStatus, kVerdict };

struct Frame {
  FrameKind kind = FrameKind::kPing;
  int32_t rank = -1;
  std::string text{};
};

// A connected stream socket. Owns its descriptor.
class PeerSocket {
 public:
  explicit PeerSocket(int descriptor = -1) : descriptor_(descriptor) {}
  ~PeerSocket() { close(); }
  PeerSocket(PeerSocket&& other) noexcept;
  PeerSocket& operator=(PeerSocket&& other) noexcept;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  void close() noexcept;
  // After the last send(): closes once the other end has read everything and closed too, or at the deadline. A close
  // alone would throw away what the other end has not read yet when something from it lies unread here.
  void finish(std::chrono::steady_clock::time_point deadline) noexcept;
  // Waits at most 200 ms for room. False: the other end is gone, or does not read.
  bool send(const Frame& frame) noexcept;
  // The next frames, at least one; none when the deadline passes or the other end goes first.
  std::vector<Frame> await(std::chrono::steady_clock::time_point deadline);
  // Appends what has arrived; does not block. False: the other end is gone, or what it sent are no frames.
  bool receive(std::vector<Frame>& frames);

 private:
  int descriptor_;
  std::string buffer_;
};

using PeerDeadline = std::chrono::steady_clock::time_point;

// A socket that listens on a free port of `address`, and its "ADDRESS:PORT". Error kComm.
std::pair<PeerSocket, std::string> listen_for_peers(const std::string& address);
// The next connection and its first frames, at least one; not open when there is none until the deadline.
std::pair<PeerSocket, std::vector<Frame>> accept_peer(PeerSocket& listener, PeerDeadline deadline);
// Error kComm after the deadline.
PeerSocket connect_to(const std::string& endpoint, PeerDeadline deadline);

}  // namespace tessera::comm
