// Limits for connections: silent clients, slow clients, the number of connections, and the connections of one address.
#include "tessera/serve/connections.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>

#include "tests/serve/serve_fixture.h"

namespace tessera::serve {
namespace {

using ConnectionStage = Connections::ConnectionStage;

// Both ends of a connection. The address of the object is the connection's key.
struct Pair {
  UniqueFd server, client;
  Pair() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    server.reset(ends[0]);
    client.reset(ends[1]);
  }
  bool is_shut() const {
    pollfd look{.fd = client.get(), .events = POLLIN | POLLRDHUP, .revents = 0};
    return ::poll(&look, 1, 0) > 0;
  }
};

TEST(Connections, AResponseThatTheClientDoesNotReadIsCutOff) {
  const Pair pair;
  Connections connections({.read_seconds = 0.1, .request_seconds = 1.9});
  const auto begin = std::chrono::steady_clock::now();
  connections.opened(&pair, pair.server.get(), "");
  connections.enter(&pair, ConnectionStage::kAnswer);
  EXPECT_EQ(testing::read_all(pair.client.get()), "");  // ends when the server closes it
  const auto lasted = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(lasted, std::chrono::seconds(2)) << "the time for requests does not count while one is answered";
  connections.closed(&pair);
}

TEST(Connections, TheFirstHeaderHasItsOwnTimeout) {
  const Pair silent, idle;
  Connections connections({.header_seconds = 0.1, .read_seconds = 1000});
  connections.opened(&silent, silent.server.get(), "");
  connections.opened(&idle, idle.server.get(), "");
  connections.enter(&idle, ConnectionStage::kBody);
  connections.enter(&idle, ConnectionStage::kAnswer);
  connections.enter(&idle, ConnectionStage::kIdle);
  EXPECT_EQ(testing::read_all(silent.client.get()), "");
  EXPECT_FALSE(idle.is_shut());
}

TEST(Connections, SilentConnectionsAreClosedForNewOnesButResponsesAreNeverCutOff) {
  std::vector<Pair> pairs(4);
  Connections connections({.connections = 3, .header_seconds = 1000, .read_seconds = 1000});
  const auto open = [&](size_t i) {
    const bool is_admitted = connections.admit("");
    connections.opened(&pairs[i], pairs[i].server.get(), "");
    return is_admitted;
  };
  open(0);
  connections.enter(&pairs[0], ConnectionStage::kBody);
  connections.enter(&pairs[0], ConnectionStage::kAnswer);
  open(1);
  connections.enter(&pairs[1], ConnectionStage::kBody);  // the body is in transit
  open(2);
  connections.enter(&pairs[2], ConnectionStage::kBody);
  connections.enter(&pairs[2], ConnectionStage::kAnswer);
  connections.enter(&pairs[2], ConnectionStage::kIdle);
  EXPECT_TRUE(open(3));
  EXPECT_TRUE(pairs[2].is_shut()) << "an idle one first";
  EXPECT_FALSE(pairs[0].is_shut() || pairs[1].is_shut() || pairs[3].is_shut());
  connections.closed(&pairs[2]);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // the last connection's header is late
  const Pair fifth;
  EXPECT_TRUE(connections.admit(""));
  EXPECT_TRUE(pairs[3].is_shut());
  connections.opened(&fifth, fifth.server.get(), "");
  connections.enter(&fifth, ConnectionStage::kAnswer);
  EXPECT_TRUE(connections.admit(""));
  EXPECT_TRUE(pairs[1].is_shut()) << "at last one that sends a body";
  const Pair sixth;
  connections.opened(&sixth, sixth.server.get(), "");
  connections.enter(&sixth, ConnectionStage::kReply);
  EXPECT_TRUE(connections.admit(""));
  EXPECT_TRUE(sixth.is_shut()) << "a reply that is not read, as of a refused request";
  const Pair seventh;
  connections.opened(&seventh, seventh.server.get(), "");
  connections.enter(&seventh, ConnectionStage::kAnswer);
  EXPECT_TRUE(connections.admit("")) << "where all are answered the library lets new ones wait";
  EXPECT_FALSE(pairs[0].is_shut() || fifth.is_shut() || seventh.is_shut());
}

TEST(Connections, EachAddressHasItsOwnLimit) {
  std::vector<Pair> pairs(4);
  Connections connections({.connections = 100, .address_connections = 2, .header_seconds = 1000});
  for (size_t i = 0; i < 4; ++i) connections.opened(&pairs[i], pairs[i].server.get(), i < 3 ? "10.0.0.1" : "10.0.0.2");
  EXPECT_TRUE(connections.admit("10.0.0.2"));
  EXPECT_TRUE(connections.admit("10.0.0.1"));
  EXPECT_TRUE(pairs[0].is_shut()) << "its own oldest one";
  EXPECT_FALSE(pairs[3].is_shut());
  for (const auto& pair : pairs) connections.enter(&pair, ConnectionStage::kAnswer);
  EXPECT_FALSE(connections.admit("10.0.0.1"));
  EXPECT_TRUE(connections.admit("10.0.0.2"));
  EXPECT_TRUE(connections.admit("")) << "loopback has none";
}

TEST(Connections, Ipv6AddressesCountByTheirFirst64Bits) {
  const auto limited = [](const char* text) {
    sockaddr_in v4{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {}, .sin_zero = {}};
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    if (::inet_pton(AF_INET, text, &v4.sin_addr) == 1) return limited_address(reinterpret_cast<sockaddr*>(&v4));
    EXPECT_EQ(::inet_pton(AF_INET6, text, &v6.sin6_addr), 1) << text;
    return limited_address(reinterpret_cast<sockaddr*>(&v6));
  };
  EXPECT_EQ(limited("10.1.2.3"), "10.1.2.3");
  EXPECT_EQ(limited("::ffff:10.1.2.3"), "10.1.2.3");
  EXPECT_EQ(limited("2001:db8:1:2:3:4:5:6"), limited("2001:db8:1:2::7"));
  EXPECT_NE(limited("2001:db8:1:2:3:4:5:6"), limited("2001:db8:1:3::7"));
  for (const char* loopback : {"127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_EQ(limited(loopback), "") << loopback;
  }
  EXPECT_EQ(limited_address(nullptr), "");
}

// There are more silent connections than the server allows, and none of them closes by itself.
TEST_F(Serve, SilentConnectionsDoNotBlockNewClients) {
  start({.connections = 32, .header_seconds = 1000, .read_seconds = 1000}, "0123456789abcdef");
  const std::string token = "Content-Type: application/json\r\nAuthorization: Bearer 0123456789abcdef\r\n";
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 96; ++i) {
    silent.push_back(testing::connect_to(port_));
    if (i % 3 == 1) testing::send_all(silent.back().get(), "POST /v1/compl");
    if (i % 3 == 2) testing::send_all(silent.back().get(), "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
  }
  for (int i = 0; i < 20; ++i) {
    const auto reply = testing::http(port_, "POST", "/v1/completions", ask("the cat", 4).dump(), token);
    EXPECT_EQ(reply.status, 200) << reply.body;
    EXPECT_EQ(nlohmann::json::parse(reply.body)["choices"][0]["text"], greedy("the cat", 4));
    silent.push_back(testing::connect_to(port_));
  }
}

TEST_F(Serve, AnIncompleteHeaderTimesOut) {
  start({.header_seconds = 0.5, .read_seconds = 1000});
  const auto silent = testing::connect_to(port_), begun = testing::connect_to(port_);
  testing::send_all(begun.get(), "GET /health HTTP/1.1\r\nHo");
  EXPECT_EQ(testing::read_all(silent.get()), "");
  EXPECT_NE(testing::parse_reply(testing::read_all(begun.get())).status, 200);
}

}  // namespace
}  // namespace tessera::serve
