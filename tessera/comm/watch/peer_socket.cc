#include "tessera/comm/watch/peer_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "tessera/base/endpoint.h"
#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kMagic = 0x31575354;  // "TSW1"
constexpr uint32_t kMaxText = 1 << 20;

struct Header {
  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kPing;
  int32_t rank = -1;
  uint32_t length = 0;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& host, int port, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  TESSERA_CHECK(!failed, ErrorKind::kComm, "[comm.watchdog] {}: {}", host, ::gai_strerror(failed));
  return {found, ::freeaddrinfo};
}

bool wait_for(int descriptor, short events, PeerDeadline deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd polled{descriptor, events, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60000)));
    if (ready > 0) return true;
    if (ready == 0 && Clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return false;
  }
}

void make_prompt(int descriptor) {
  const int yes = 1;
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

// Of a bound socket.
std::string endpoint_of(int descriptor) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  const auto* address = reinterpret_cast<const sockaddr*>(&bound);
  if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&bound), &size) != 0 ||
      ::getnameinfo(address, size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  return bound.ss_family == AF_INET6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

}  // namespace

PeerSocket::PeerSocket(PeerSocket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), buffer_(std::move(other.buffer_)) {}

PeerSocket& PeerSocket::operator=(PeerSocket&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::exchange(other.descriptor_, -1);
    buffer_ = std::move(other.buffer_);
  }
  return *this;
}

void PeerSocket::close() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

void PeerSocket::finish(PeerDeadline deadline) noexcept {
  if (!open()) return;
  ::shutdown(descriptor_, SHUT_WR);
  char rest[4096];
  while (wait_for(descriptor_, POLLIN, deadline)) {
    const ssize_t count = ::recv(descriptor_, rest, sizeof rest, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) break;
  }
  close();
}

bool PeerSocket::send(const Frame& frame) noexcept {
  if (!open()) return false;
  const Header header{
      .kind = frame.kind, .rank = frame.rank, .length = std::min<uint32_t>(frame.text.size(), kMaxText)};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.append(frame.text, 0, header.length);
  const auto deadline = Clock::now() + milliseconds(200);
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t count = ::send(descriptor_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      sent += static_cast<size_t>(count);
    } else if (count < 0 && errno != EINTR && (errno != EAGAIN || !wait_for(descriptor_, POLLOUT, deadline))) {
      return false;
    }
  }
  return true;
}

bool PeerSocket::receive(std::vector<Frame>& frames) {
  if (!open()) return false;
  bool ended = false;
  char chunk[16384];
  for (;;) {
    const ssize_t count = ::recv(descriptor_, chunk, sizeof chunk, MSG_DONTWAIT);
    if (count > 0) {
      buffer_.append(chunk, static_cast<size_t>(count));
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      ended = true;
      break;
    } else if (errno == EAGAIN) {
      break;
    }
  }
  size_t used = 0;
  while (buffer_.size() - used >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, buffer_.data() + used, sizeof header);
    if (header.magic != kMagic || header.length > kMaxText) return false;
    if (buffer_.size() - used < sizeof header + header.length) break;
    frames.push_back({header.kind, header.rank, buffer_.substr(used + sizeof header, header.length)});
    used += sizeof header + header.length;
  }
  buffer_.erase(0, used);
  return !ended;
}

std::vector<Frame> PeerSocket::await(PeerDeadline deadline) {
  std::vector<Frame> frames;
  while (frames.empty() && wait_for(descriptor_, POLLIN, deadline) && receive(frames)) {
  }
  return frames;
}

std::pair<PeerSocket, std::string> listen_for_peers(const std::string& address) {
  const Addresses addresses = resolve(address, 0, AI_PASSIVE);
  for (const addrinfo* one = addresses.get(); one; one = one->ai_next) {
    PeerSocket socket(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol));
    if (!socket.open() || ::bind(socket.descriptor(), one->ai_addr, one->ai_addrlen) != 0) continue;
    if (::listen(socket.descriptor(), SOMAXCONN) != 0) continue;
    std::string endpoint = endpoint_of(socket.descriptor());
    return {std::move(socket), std::move(endpoint)};
  }
  raise(ErrorKind::kComm, "[comm.watchdog] cannot listen on {}: {}", address, std::strerror(errno));
}

std::pair<PeerSocket, std::vector<Frame>> accept_peer(PeerSocket& listener, PeerDeadline deadline) {
  while (wait_for(listener.descriptor(), POLLIN, deadline)) {
    PeerSocket socket(::accept4(listener.descriptor(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.open()) continue;
    make_prompt(socket.descriptor());
    auto frames = socket.await(std::min(deadline, Clock::now() + std::chrono::seconds(5)));
    if (!frames.empty()) return {std::move(socket), std::move(frames)};
  }
  return std::pair<PeerSocket, std::vector<Frame>>();
}

PeerSocket connect_to(const std::string& endpoint, PeerDeadline deadline) {
  const auto [host, port] = parse_endpoint(endpoint, "the watchdog of rank 0");
  int reason = 0;
  do {
    const Addresses addresses = resolve(host, port, 0);
    for (const addrinfo* one = addresses.get(); one; one = one->ai_next) {
      PeerSocket socket(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol));
      if (!socket.open()) continue;
      make_prompt(socket.descriptor());
      if (::connect(socket.descriptor(), one->ai_addr, one->ai_addrlen) == 0) return socket;
      reason = errno;
      if (reason != EINPROGRESS || !wait_for(socket.descriptor(), POLLOUT, deadline)) continue;
      socklen_t size = sizeof reason;
      ::getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &reason, &size);
      if (reason == 0) return socket;
    }
    std::this_thread::sleep_for(milliseconds(50));
  } while (Clock::now() < deadline);
  raise(ErrorKind::kComm, "[comm.watchdog] cannot reach rank 0 at {}: {}", endpoint, std::strerror(reason));
}

}  // namespace tessera::comm
