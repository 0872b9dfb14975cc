#include "tessera/serve/connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <utility>

namespace tessera::serve {
namespace {

// The age up to which the first header of a new connection counts as on time. shut_down_silent_connection() prefers
// connections whose first header is late.
constexpr std::chrono::milliseconds kJustConnected{500};

}  // namespace

std::string limited_address(const sockaddr* address) {
  if (address == nullptr) return "";
  char text[INET6_ADDRSTRLEN] = "";
  const auto of_v4 = [&](const void* four_bytes) -> std::string {
    const auto* bytes = static_cast<const unsigned char*>(four_bytes);
    if (bytes[0] == 127) return "";
    return ::inet_ntop(AF_INET, four_bytes, text, sizeof text);
  };
  if (address->sa_family == AF_INET) return of_v4(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr);
  if (address->sa_family != AF_INET6) return "";
  auto v6 = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  if (IN6_IS_ADDR_LOOPBACK(&v6)) return "";
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return of_v4(&v6.s6_addr[12]);
  std::fill(v6.s6_addr + 8, v6.s6_addr + 16, 0);
  return ::inet_ntop(AF_INET6, &v6, text, sizeof text);
}

Connections::Connections(const Limits& limits) : limits_(limits), thread_([this] { watch(); }) {}

Connections::~Connections() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

int64_t Connections::count_open(const std::string* address) const {
  return std::ranges::count_if(open_, [&](const auto& entry) {
    return !entry.second.is_shut && (address == nullptr || entry.second.address == *address);
  });
}

// Shuts down one connection of this address (null: of any address). The order of preference: a connection whose first
// header is late; an idle one; one whose first header is still on time; one in ConnectionStage::kBody or kReply. Among
// equals the connection that has been in its stage longest is chosen. Returns false when every connection of this
// address is in ConnectionStage::kAnswer (its answer is being computed or sent) or already shut down. The socket is
// only shut down here, not closed. The connection's own thread notices the shutdown and closes the socket, so the file
// descriptor cannot be reused while that thread still uses it.
bool Connections::shut_down_silent_connection(const std::string* address) {
  const auto now = Clock::now();
  const auto shutdown_priority = [&](const Connection& connection) {
    switch (connection.stage) {
      case ConnectionStage::kHeader:
        return now - connection.since > kJustConnected ? 0 : 2;
      case ConnectionStage::kIdle:
        return 1;
      default:
        return 3;
    }
  };
  Connection* found = nullptr;
  for (auto& [key, connection] : open_) {
    if (connection.is_shut || connection.stage == ConnectionStage::kAnswer) continue;
    if (address != nullptr && connection.address != *address) continue;
    const auto place = [&](const Connection& of) { return std::pair(shutdown_priority(of), of.since); };
    if (found == nullptr || place(connection) < place(*found)) found = &connection;
  }
  if (found == nullptr) return false;
  found->is_shut = true;
  ::shutdown(found->socket, SHUT_RDWR);
  return true;
}

// limits_.connections refuses no client: if no silent connection can be shut down for a new one, the new one is
// accepted all the same. libmicrohttpd refuses connections only beyond a higher limit (server.cc).
bool Connections::admit(const std::string& address) {
  const std::lock_guard lock(mutex_);
  if (!address.empty() && count_open(&address) >= limits_.address_connections &&
      !shut_down_silent_connection(&address)) {
    return false;
  }
  if (count_open(nullptr) >= limits_.connections) shut_down_silent_connection(nullptr);
  return true;
}

void Connections::opened(const void* key, int socket, const std::string& address) {
  const std::lock_guard lock(mutex_);
  open_[key] = {.socket = socket, .address = address, .since = Clock::now()};
}

void Connections::enter(const void* key, ConnectionStage stage) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(key);
  if (found == open_.end()) return;
  found->second.stage = stage;
  found->second.since = Clock::now();
}

void Connections::closed(const void* key) {
  const std::lock_guard lock(mutex_);
  open_.erase(key);
}

int64_t Connections::count_answering() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::count_if(open_, [](const auto& entry) {
    return entry.second.stage == ConnectionStage::kAnswer || entry.second.stage == ConnectionStage::kReply;
  });
}

std::chrono::duration<double> Connections::time_for(ConnectionStage stage) const {
  const double seconds = stage == ConnectionStage::kHeader   ? limits_.header_seconds
                         : stage == ConnectionStage::kAnswer ? limits_.request_seconds + limits_.read_seconds
                                                             : limits_.read_seconds;
  return std::chrono::duration<double>(seconds);
}

// The loop of the internal thread. It shuts down each connection that has exceeded the time limit of its stage, but
// does not close it. libmicrohttpd has one thread for each connection; this thread notices the shutdown and closes the
// connection.
void Connections::watch() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::milliseconds(500), [this] { return ending_; })) {
    for (auto& [key, connection] : open_) {
      if (Clock::now() - connection.since <= time_for(connection.stage)) continue;
      connection.is_shut = true;
      ::shutdown(connection.socket, SHUT_RDWR);
    }
  }
}

}  // namespace tessera::serve
