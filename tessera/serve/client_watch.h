// Detects that the client of a request has closed its connection before the answer.
//
//   ClientWatch watch(socket);
//   if (watch.is_gone([&] { send_comment(); })) stop();
//
// A client that has closed its connection and a client that has closed only its sending side (`nc -N`) look the same
// until the server sends something: a closed connection then answers with a TCP reset. So the first is_gone() that
// finds the sending side closed calls `probe`, which sends bytes that every client ignores; later calls of is_gone()
// see whether a reset came. Not thread-safe.
#pragma once

#include <poll.h>

namespace tessera::serve {

class ClientWatch {
 public:
  explicit ClientWatch(int socket) : socket_(socket) {}

  // True when the connection is gone. The first call that finds only the client's sending side closed calls `probe`,
  // which sends bytes to the client, and returns false. Later calls do not call `probe` again: they return true once
  // the client's TCP reset has come.
  template <class Probe>
  bool is_gone(const Probe& probe) {
    // poll() is used instead of recv(): recv() would first return bytes that the client has already sent for its next
    // request, and would not show that the sending side is closed.
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
