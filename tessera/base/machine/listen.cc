#include "tessera/base/machine/listen.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "tessera/base/error.h"

namespace tessera {
namespace {

std::string numeric(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST] = "";
  return ::getnameinfo(address, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0 ? host : "";
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
  }
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

int port_of(int descriptor) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

// A listening socket; on failure it is not open and errno is set.
UniqueFd listen_on(const sockaddr* address, socklen_t size) {
  UniqueFd socket(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.open()) return socket;
  const int yes = 1, no = 0;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (address->sa_family == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  if (::bind(socket.get(), address, size) == 0 && ::listen(socket.get(), 1024) == 0) return socket;
  const int reason = errno;
  socket.reset();
  errno = reason;
  return socket;
}

// Listens on all interfaces, IPv6 and IPv4; IPv4 only if the kernel has no IPv6.
UniqueFd listen_on_all_interfaces(int port) {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  UniqueFd socket = listen_on(reinterpret_cast<const sockaddr*>(&any6), sizeof any6);
  if (socket.open() || errno == EADDRINUSE) return socket;
  sockaddr_in any4{};  // for a kernel without IPv6
  any4.sin_family = AF_INET;
  any4.sin_port = any6.sin6_port;
  return listen_on(reinterpret_cast<const sockaddr*>(&any4), sizeof any4);
}

}  // namespace

// The resolved addresses are tried in order. Loopback addresses are skipped for kOtherHosts, because a name like
// "localhost" or Debian's 127.0.1.1 resolves to loopback here but means this host for others. A port in use ends the
// search with an error, because a server on another address of the name would not be found by all clients.
ListeningSocket listen_at(const std::string& host, int port, ListenScope scope) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  TESSERA_CHECK(!failed, ErrorKind::kConfig, "[listen] {}: {}. Wanted an address of this host.", host,
                ::gai_strerror(failed));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  if (host == "127.0.0.1" || host == "::1") scope = ListenScope::kThisHost;
  int reason = 0;
  for (const addrinfo* one = found; one && reason != EADDRINUSE; one = one->ai_next) {
    if (scope == ListenScope::kOtherHosts && is_loopback(one->ai_addr)) continue;
    UniqueFd socket = listen_on(one->ai_addr, one->ai_addrlen);
    if (socket.open()) {
      const int chosen = port_of(socket.get());
      return {.socket = std::move(socket), .address = numeric(one->ai_addr, one->ai_addrlen), .port = chosen};
    }
    reason = errno;
  }
  if (scope == ListenScope::kOtherHosts && reason != EADDRINUSE) {
    UniqueFd socket = listen_on_all_interfaces(port);
    if (socket.open()) {
      const int chosen = port_of(socket.get());
      return {.socket = std::move(socket), .address = "127.0.0.1", .port = chosen, .on_all_interfaces = true};
    }
    reason = errno;
  }
  TESSERA_CHECK(reason != EADDRINUSE, ErrorKind::kComm, "[listen] port {} of {} is in use", port, host);
  raise(ErrorKind::kConfig, "[listen] cannot listen on {}:{}: {}.{}", host, port, std::strerror(reason),
        reason == EADDRNOTAVAIL ? " Wanted an address of this host." : "");
}

// connect() on a datagram socket sends nothing; it only makes the kernel choose a route and its local address.
std::string address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICSERV;
  if (host.empty() || ::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  for (const addrinfo* one = found; one; one = one->ai_next) {
    const UniqueFd socket(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    auto* own = reinterpret_cast<sockaddr*>(&address);
    if (socket.open() && ::connect(socket.get(), one->ai_addr, one->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), own, &size) == 0 && !is_loopback(own)) {
      return numeric(own, size);
    }
  }
  return "";
}

std::vector<InterfaceAddress> interfaces_of_this_host() {
  ifaddrs* list = nullptr;
  std::vector<InterfaceAddress> result;
  if (::getifaddrs(&list) != 0) return result;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  for (const ifaddrs* one = list; one; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP)) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr)) {
      continue;  // cannot be used by another host without its interface
    }
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    const std::string address = numeric(one->ifa_addr, size);
    if (!address.empty()) result.push_back({one->ifa_name, address});
  }
  return result;
}

bool is_loopback(std::string_view address) { return address.starts_with("127.") || address == "::1"; }

std::vector<std::string> interface_addresses() {
  std::vector<std::string> result;
  for (const InterfaceAddress& one : interfaces_of_this_host()) {
    const bool is_known = std::ranges::find(result, one.address) != result.end();
    if (!is_loopback(one.address) && !is_known) result.push_back(one.address);
  }
  return result;
}

}  // namespace tessera
