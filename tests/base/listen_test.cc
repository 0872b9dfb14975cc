// The addresses at which listen_at() listens, for this host and for other hosts, and its errors.
#include "tessera/base/machine/listen.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cstring>
#include <functional>

#include "tessera/base/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// The address at which a socket listens; "" if it listens on all interfaces.
std::string bound_to(const ListeningSocket& listening) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  EXPECT_EQ(::getsockname(listening.socket.get(), reinterpret_cast<sockaddr*>(&bound), &size), 0);
  char text[INET6_ADDRSTRLEN] = "";
  if (bound.ss_family == AF_INET6) {
    const auto& address = reinterpret_cast<const sockaddr_in6&>(bound).sin6_addr;
    return IN6_IS_ADDR_UNSPECIFIED(&address) ? "" : ::inet_ntop(AF_INET6, &address, text, sizeof text);
  }
  const auto& address = reinterpret_cast<const sockaddr_in&>(bound).sin_addr;
  return address.s_addr == INADDR_ANY ? "" : ::inet_ntop(AF_INET, &address, text, sizeof text);
}

bool connects(int port) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

TEST(Listen, ForThisHostBindsOnlyTheGivenAddress) {
  const ListeningSocket here = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
  EXPECT_EQ(bound_to(here), "127.0.0.1");
  EXPECT_GT(here.port, 0);
  EXPECT_FALSE(here.on_all_interfaces);
}

// Runs `body` in a process with a network namespace of its own that has only loopback. Returns 0; 1 if an expectation
// of `body` failed; -1 if this user may not make network namespaces.
int in_own_network(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNET) != 0) ::_exit(77);
    const UniqueFd any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq loopback{};
    std::strcpy(loopback.ifr_name, "lo");
    loopback.ifr_flags = IFF_UP;
    if (::ioctl(any.get(), SIOCSIFFLAGS, &loopback) != 0) ::_exit(78);
    body();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return code == 77 ? -1 : code;
}

// Other hosts cannot reach 127.0.1.1, and this host cannot bind 192.0.2.1, which is another host's address. In both
// cases the socket listens on all interfaces.
TEST(Listen, ForOtherHostsANameThatResolvesToLoopbackBindsAllInterfaces) {
  const int outcome = in_own_network([] {
    for (const char* host : {"localhost", "127.0.1.1", "192.0.2.1"}) {
      SCOPED_TRACE(host);
      const ListeningSocket master = listen_at(host, 0, ListenScope::kOtherHosts);
      EXPECT_EQ(bound_to(master), "");
      EXPECT_TRUE(master.on_all_interfaces);
      EXPECT_TRUE(connects(master.port));
    }
    const ListeningSocket meant = listen_at("127.0.0.1", 0, ListenScope::kOtherHosts);
    EXPECT_EQ(bound_to(meant), "127.0.0.1");
    EXPECT_TRUE(interface_addresses().empty());
    EXPECT_EQ(address_towards("127.0.0.1"), "");
  });
  if (outcome < 0) {
    GTEST_SKIP() << "NOT RUN: this user may not make network namespaces (CAP_SYS_ADMIN)";
  }
  EXPECT_EQ(outcome, 0);
}

TEST(Listen, ErrorsNameTheReason) {
  const ListeningSocket here = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
  const auto error_of = [](const std::string& host, int port, ListenScope reach) -> std::string {
    try {
      listen_at(host, port, reach);
    } catch (const Error& error) {
      return std::string(to_string(error.kind())) + " " + error.what();
    }
    return "none";
  };
  EXPECT_EQ(error_of("127.0.0.1", here.port, ListenScope::kThisHost),
            "comm [listen] port " + std::to_string(here.port) + " of 127.0.0.1 is in use");
  EXPECT_THAT(error_of("192.0.2.1", 2000, ListenScope::kThisHost),
              HasSubstr("config [listen] cannot listen on 192.0.2.1:2000"));
  EXPECT_THAT(error_of("no-such-name.invalid", 2000, ListenScope::kOtherHosts),
              HasSubstr("config [listen] no-such-name.invalid"));
}

}  // namespace
}  // namespace tessera
