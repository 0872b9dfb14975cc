// The choice of the network interface from GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
#include "tessera/comm/backends/interface_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

const std::vector<InterfaceAddress> kHost = {{"lo", "127.0.0.1"},   {"lo", "::1"},       {"docker0", "172.17.0.1"},
                                             {"eth0", "10.0.0.7"},  {"eth0", "fd00::7"}, {"eth1", "10.1.0.7"},
                                             {"ib0", "192.168.0.7"}};

TEST(InterfaceChoice, PatternsMatchLikeNccl) {
  EXPECT_TRUE(interface_matches("eth", "eth1"));
  EXPECT_TRUE(interface_matches("ib,eth0", "eth0"));
  EXPECT_FALSE(interface_matches("ib,eth0", "eth1"));
  EXPECT_TRUE(interface_matches("=eth1", "eth1"));
  EXPECT_FALSE(interface_matches("=eth1", "eth10"));
  EXPECT_TRUE(interface_matches("^docker,lo", "eth0"));
  EXPECT_FALSE(interface_matches("^docker,lo", "docker0"));
  EXPECT_FALSE(interface_matches("^=eth1", "eth1"));
  EXPECT_TRUE(interface_matches("^=eth1", "eth10"));
  EXPECT_FALSE(interface_matches(",", "eth0"));
}

TEST(InterfaceChoice, PrefersTheInterfaceOnTheRouteToOtherHosts) {
  EXPECT_EQ(choose_address(kHost, "eth", "10.1.0.7"), "10.1.0.7");
  EXPECT_EQ(choose_address(kHost, "ib", "10.0.0.7"), "192.168.0.7");  // the setting comes before the kernel's choice
  EXPECT_EQ(choose_address(kHost, "eth", "fd00::9"), "fd00::7");      // of the same address family
  EXPECT_EQ(choose_address(kHost, "^docker", ""), "10.0.0.7");        // loopback comes last
  EXPECT_EQ(choose_address(kHost, "lo", ""), "127.0.0.1");
  EXPECT_EQ(choose_address(kHost, "ib", "fd00::7"), "192.168.0.7");  // the chosen interface has no IPv6 address
  EXPECT_EQ(choose_address({{"eth0", "fd00::7"}, {"eth0", "10.0.0.7"}}, "eth", ""), "10.0.0.7");
  EXPECT_EQ(choose_address({{"lo", "127.0.0.1"}, {"eth0", "fd00::7"}}, "^docker", "10.0.0.7"), "fd00::7");
  EXPECT_EQ(choose_address(kHost, "wlan", "10.0.0.7"), "");
}

TEST(InterfaceChoice, ErrorWithoutAMatchListsTheInterfaces) {
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  EXPECT_EQ(own_address("127.0.0.1"), "127.0.0.1");
  ::setenv("GLOO_SOCKET_IFNAME", "=no-such-interface", 1);  // this variable comes before NCCL_SOCKET_IFNAME
  try {
    own_address("127.0.0.1");
    ADD_FAILURE() << "found one";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(error.what(), HasSubstr("GLOO_SOCKET_IFNAME='=no-such-interface': no active network interface fits"));
    EXPECT_THAT(error.what(), HasSubstr("lo"));
  }
  ::unsetenv("GLOO_SOCKET_IFNAME");
  ::unsetenv("NCCL_SOCKET_IFNAME");
}

}  // namespace
}  // namespace tessera::comm
