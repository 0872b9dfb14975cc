#include "tessera/comm/watch/peer_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kMagic = 0x31575354;  // "TSW1"
constexpr uint32_t kMaxText = 1 << 20;
constexpr size_t kMaxUnsent = 8 << 20;
constexpr milliseconds kPatience{5000};  // time limit for the first frame of a connection
constexpr size_t kMaxGuests = 1024;      // connections that have sent no frame yet

struct Header {
  uint32_t magic = kMagic;
  WatchdogFrameKind kind = WatchdogFrameKind::kPing;
  int32_t rank = -1;
  uint32_t length = 0;
};

int milliseconds_until(PeerDeadline deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60000));
}

}  // namespace

bool wait_until_ready(int descriptor, short events, PeerDeadline deadline) {
  for (;;) {
    pollfd polled{descriptor, events, 0};
    const int ready = ::poll(&polled, 1, milliseconds_until(deadline));
    if (ready > 0) return true;
    if (ready == 0 && Clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return false;
  }
}

PeerSocket::PeerSocket(UniqueFd socket) : socket_(std::move(socket)) {
  if (!open()) return;
  const int yes = 1;
  ::setsockopt(descriptor(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  ::fcntl(descriptor(), F_SETFL, ::fcntl(descriptor(), F_GETFL) | O_NONBLOCK);
}

void PeerSocket::finish(PeerDeadline deadline) noexcept {
  if (!open()) return;
  while (has_unsent() && wait_until_ready(descriptor(), POLLOUT, deadline) && flush()) {
  }
  ::shutdown(descriptor(), SHUT_WR);
  char rest[4096];
  while (Clock::now() < deadline && wait_until_ready(descriptor(), POLLIN, deadline)) {
    const ssize_t count = ::recv(descriptor(), rest, sizeof rest, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) break;
  }
  close();
}

bool PeerSocket::send(const WatchdogFrame& frame) noexcept {
  if (!open()) return false;
  const Header header{
      .kind = frame.kind, .rank = frame.rank, .length = std::min<uint32_t>(frame.text.size(), kMaxText)};
  if (outgoing_.size() - sent_ > kMaxUnsent) {
    ::shutdown(descriptor(), SHUT_RDWR);  // receive() then returns false
    return false;
  }
  outgoing_.append(reinterpret_cast<const char*>(&header), sizeof header);
  outgoing_.append(frame.text, 0, header.length);
  return flush();
}

// flush() removes sent bytes from outgoing_ only when all bytes are sent or more than 8 MiB are sent. A removal moves
// the unsent bytes to the front of outgoing_, which would be expensive after every call of send(2).
bool PeerSocket::flush() noexcept {
  while (has_unsent()) {
    const ssize_t count =
        ::send(descriptor(), outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      sent_ += static_cast<size_t>(count);
    } else if (count < 0 && errno != EINTR) {
      if (errno == EAGAIN) break;
      outgoing_.clear();
      sent_ = 0;
      return false;
    }
  }
  if (sent_ == outgoing_.size() || sent_ > kMaxUnsent) {
    outgoing_.erase(0, sent_);
    sent_ = 0;
  }
  return open();
}

// Reads until the socket is empty, then takes all whole frames from the buffer; a part of a frame stays for the next
// call. Frames that arrived before an end of the connection are returned together with false.
bool PeerSocket::receive(std::vector<WatchdogFrame>& frames) {
  if (!open()) return false;
  bool ended = false;
  char chunk[16384];
  for (;;) {
    const ssize_t count = ::recv(descriptor(), chunk, sizeof chunk, MSG_DONTWAIT);
    if (count > 0) {
      incoming_.append(chunk, static_cast<size_t>(count));
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      ended = true;
      break;
    } else if (errno == EAGAIN) {
      break;
    }
  }
  size_t used = 0;
  while (incoming_.size() - used >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, incoming_.data() + used, sizeof header);
    if (header.magic != kMagic || header.length > kMaxText) return false;
    if (incoming_.size() - used < sizeof header + header.length) break;
    frames.push_back({header.kind, header.rank, incoming_.substr(used + sizeof header, header.length)});
    used += sizeof header + header.length;
  }
  incoming_.erase(0, used);
  return !ended;
}

std::vector<WatchdogFrame> PeerSocket::await(PeerDeadline deadline) {
  std::vector<WatchdogFrame> frames;
  while (frames.empty() && wait_until_ready(descriptor(), POLLIN, deadline) && receive(frames)) {
  }
  return frames;
}

ConnectionAcceptor::ConnectionAcceptor(UniqueFd listener) : listener_(std::move(listener)) {
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
}

// Accepts one connection. When the process has no descriptor left, closes the oldest connection in `pending_` (one that
// has not sent a whole frame yet) and tries accept() again. If pending_ is empty, accepting pauses for 50 ms, because
// poll() would report the listener again and again.
void ConnectionAcceptor::accept_connection() {
  for (;;) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.open()) {
      pending_.push_back({PeerSocket(std::move(socket)), Clock::now() + kPatience});
      if (pending_.size() > kMaxGuests) pending_.pop_front();
      return;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return;
    if (pending_.empty()) {
      full_until_ = Clock::now() + milliseconds(50);
      return;
    }
    pending_.pop_front();  // EMFILE or a similar error: the oldest silent connection is closed to free a descriptor
  }
}

// Polls the listener and all connections in `pending_` (those that have not sent a whole frame yet) at once, so that a
// connection that sends nothing does not delay the others. Returns when the first of these connections has sent a whole
// frame.
std::pair<PeerSocket, std::vector<WatchdogFrame>> ConnectionAcceptor::next(PeerDeadline deadline) {
  for (;;) {
    const auto now = Clock::now();
    std::erase_if(pending_, [&](const PendingConnection& connection) { return connection.patience <= now; });
    const bool full = full_until_ > now;
    std::vector<pollfd> polled = {{full ? -1 : listener_.get(), POLLIN, 0}};
    auto until = full ? std::min(deadline, full_until_) : deadline;
    for (const PendingConnection& connection : pending_) {
      polled.push_back({connection.socket.descriptor(), POLLIN, 0});
      until = std::min(until, connection.patience);
    }
    if (::poll(polled.data(), polled.size(), milliseconds_until(until)) <= 0) {
      if (Clock::now() >= deadline) return std::pair<PeerSocket, std::vector<WatchdogFrame>>();
      continue;
    }
    size_t i = 1;
    for (auto connection = pending_.begin(); connection != pending_.end(); ++i) {
      std::vector<WatchdogFrame> frames;
      const bool stays = !polled[i].revents || connection->socket.receive(frames);
      if (!frames.empty()) {
        PeerSocket socket = std::move(connection->socket);
        pending_.erase(connection);
        return std::pair(std::move(socket), std::move(frames));
      }
      connection = stays ? std::next(connection) : pending_.erase(connection);
    }
    if (polled[0].revents) accept_connection();
  }
}

PeerSocket connect_to(const std::string& host, int port, PeerDeadline deadline, std::string& reason) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  if (const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
    reason = ::gai_strerror(failed);
    return PeerSocket();
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  for (const addrinfo* one = found; one; one = one->ai_next) {
    PeerSocket socket(UniqueFd(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol)));
    int error = errno;
    if (socket.open()) {
      error = ::connect(socket.descriptor(), one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        socklen_t size = sizeof error;
        if (wait_until_ready(socket.descriptor(), POLLOUT, deadline)) {
          ::getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
        }
      }
      if (error == 0) return socket;
    }
    reason = std::strerror(error);
  }
  return PeerSocket();
}

}  // namespace tessera::comm
