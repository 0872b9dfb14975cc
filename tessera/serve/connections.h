// Open connections: those that are silent for too long are shut, and silent ones make room for new ones.
//
//   Connections connections({.connections = 256, .address_connections = 192, .header_seconds = 5, ...});
//   if (!connections.admit(address)) refuse();                 // before a connection is accepted
//   connections.opened(key, socket, address);
//   connections.enter(key, Connections::Stage::kBody);         // its header is here
//   connections.enter(key, Connections::Stage::kAnswer);
//   connections.enter(key, Connections::Stage::kIdle);
//   connections.closed(key);
//
// Every connection may be shut to make room but one for which the model works. Thread-safe; a thread of its own looks
// for late connections once in half a second.
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
  enum class Stage {
    kHeader,  // since it was opened
    kBody,    // the header of a request is here
    kReply,   // a reply that needs no model, as of a refused request, is on the way
    kAnswer,  // a whole request of a client that may ask the model is here
    kIdle,    // it waits for the next request
  };
  explicit Connections(const Limits& limits);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Whether a connection from this address may come in. Where there are too many, a silent one is shut for it. An empty
  // address has no limit of its own.
  bool admit(const std::string& address);
  void opened(const void* key, int socket, const std::string& address);
  void enter(const void* key, Stage stage);
  void closed(const void* key);
  int64_t being_answered() const;  // replies too

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int socket = -1;
    std::string address{};
    Stage stage = Stage::kHeader;
    Clock::time_point since{};  // of the stage
    bool is_shut = false;       // and not closed yet
  };
  int64_t count_open(const std::string* address) const;
  bool shut_silent(const std::string* address);
  std::chrono::duration<double> time_for(Stage stage) const;
  void watch();

  const Limits limits_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<const void*, Connection> open_;
  bool ending_ = false;
  std::thread thread_;
};

// The address for Connections: the digits of an IPv4 address, the first 64 bits of an IPv6 one, which a provider gives
// to one customer; empty for loopback, where a proxy may stand for many clients, and for sockets without an address.
std::string limited_address(const sockaddr* address);

}  // namespace tessera::serve
