// Ports of this host for tests.
//
//   const int port = free_port();                       // of a program that binds it later
//   const TakenPort taken;  taken.number();             // one that is in use
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "tessera/base/files/unique_fd.h"

namespace tessera::testing {

inline sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A port that no other test uses, in this process or in another one. The port is below the range of outgoing
// connections. A Unix socket with the port's name reserves the port until this process and its forks have ended.
inline int free_port() {
  static std::minstd_rand random(std::random_device{}());
  for (;;) {
    const int port = 10'000 + static_cast<int>(random() % 20'000);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const int length = std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "tessera-test-port-%d", port);
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
    UniqueFd held(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = loopback(port);
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    if (::bind(held.get(), reinterpret_cast<sockaddr*>(&name), bytes) != 0 ||
        ::bind(probe.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      continue;
    }
    static_cast<void>(held.release());
    return port;
  }
}

// A port of the loopback address that is in use as long as the object exists.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    auto address = loopback(0);
    socklen_t size = sizeof address;
    if (::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(socket_.get(), 1) != 0 ||
        ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      std::abort();
    }
    number_ = ntohs(address.sin_port);
  }
  int number() const { return number_; }

 private:
  UniqueFd socket_;
  int number_ = 0;
};

}  // namespace tessera::testing
