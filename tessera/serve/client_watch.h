// Whether the client of a request still waits for the answer.
//
//   ClientWatch watch(socket);
//   if (watch.is_gone([&] { send_comment(); })) stop();
//
// A client that closes its connection and one that closes only its sending side, as `nc -N` does, look the same until
// something is sent: the first answers with a reset. So the first look that finds the sending side closed calls
// `probe`, which sends bytes that no client minds, and later looks tell the two apart. One thread at a time.
#pragma once

#include <poll.h>

namespace tessera::serve {

class ClientWatch {
 public:
  explicit ClientWatch(int socket) : socket_(socket) {}

  // True when the connection is gone. `probe` is called once at most.
  template <class Probe>
  bool is_gone(const Probe& probe) {
    // Not by reading: bytes that the client sent ahead would hide its end.
    pollfd look{.fd = socket_, .events = POLLRDHUP, .revents = 0};
    if (::poll(&look, 1, 0) <= 0) return false;
    if ((look.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0) return true;
    if (!probed_) probe();
    probed_ = true;
    return false;
  }

 private:
  int socket_;
  bool probed_ = false;
};

}  // namespace tessera::serve
