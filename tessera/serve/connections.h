// The open connections of the server. Connections that are silent for too long are shut down, and when there are too
// many connections, a silent one is shut down for a new one.
//
//   Connections connections({.connections = 256, .address_connections = 192, .header_seconds = 5, ...});
//   if (!connections.admit(address)) refuse();                 // before a connection is accepted
//   connections.opened(key, socket, address);
//   connections.enter(key, Connections::ConnectionStage::kBody);  // the header has arrived
//   connections.enter(key, Connections::ConnectionStage::kAnswer);
//   connections.enter(key, Connections::ConnectionStage::kIdle);
//   connections.closed(key);
//
// Any connection may be shut down to make room, except one that waits for an answer of the model (kAnswer).
// Thread-safe; an internal thread checks the time limits every half second.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "tessera/serve/limits.h"

namespace tessera::serve {

class Connections {
 public:
  enum class ConnectionStage {
    kHeader,  // the connection is open, its first header has not arrived
    kBody,    // the header of a request has arrived, the body not yet
    kReply,   // a reply without the model is being sent, e.g. an error
    kAnswer,  // a whole request has arrived, and its answer is being computed or sent
    kIdle,    // the last reply has been sent, the next request has not begun
  };
  explicit Connections(const Limits& limits);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Whether to accept a connection from `address` (limited_address). If the open connections, of this address or in
  // all, have reached their limit, first shuts down one of them whose stage is not ConnectionStage::kAnswer. Returns
  // false when this address has reached its limit and all its connections are in the stage kAnswer. An empty address
  // has no limit of its own.
  bool admit(const std::string& address);
  // `key` identifies the connection in the calls below.
  void opened(const void* key, int socket, const std::string& address);  // the connection begins in kHeader
  void enter(const void* key, ConnectionStage stage);                    // the time limit of the stage begins now
  void closed(const void* key);
  int64_t count_answering() const;  // number of connections in kAnswer or kReply

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int socket = -1;
    std::string address{};
    ConnectionStage stage = ConnectionStage::kHeader;
    Clock::time_point since{};  // begin of the stage
    bool is_shut = false;       // shut down, but not closed yet
  };
  // count_open() and shut_down_silent_connection() consider only the connections from the client address `address`, or
  // all connections if `address` is null.
  int64_t count_open(const std::string* address) const;
  bool shut_down_silent_connection(const std::string* address);
  std::chrono::duration<double> time_for(ConnectionStage stage) const;
  void watch();

  const Limits limits_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<const void*, Connection> open_;
  bool ending_ = false;
  std::thread thread_;
};

// The address by which Connections counts clients: an IPv4 address, or the first 64 bits of an IPv6 address, because a
// provider gives such a network to one customer. Empty (no limit) for loopback, because a proxy may connect from there
// for many clients, and for sockets without an address.
std::string limited_address(const sockaddr* address);

}  // namespace tessera::serve
