// The store of a run: values, waits, the check of new connections, and the limits for connections that do not belong to
// the run.
#include "tessera/comm/rendezvous/run_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <thread>

#include "tessera/base/machine/listen.h"
#include "tessera/comm/watch/peer_socket.h"
#include "tests/support/few_descriptors.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

struct Hub {
  int port = 0;
  std::shared_ptr<RunStoreServer> server;

  explicit Hub(const RunIdentity& identity = {.token = "t", .run = "nightly", .who = "rank 0"},
               const std::string& host = "127.0.0.1") {
    ListeningSocket here = listen_at(host, 0, ListenScope::kThisHost);
    port = here.port;
    server = std::make_shared<RunStoreServer>(std::move(here.socket), identity);
  }
  c10::intrusive_ptr<RunStore> connect(const RunIdentity& identity = {.token = "t", .run = "nightly", .who = "rank 1"},
                                       const std::string& host = "127.0.0.1") const {
    return c10::make_intrusive<RunStore>(RunStoreAddress{.host = host, .port = port}, identity, seconds(5));
  }
};

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

TEST(RunStore, SupportsTheStoreOperations) {
  const Hub hub;
  const auto one = hub.connect(), other = hub.connect();
  one->set("a", bytes("1"));
  EXPECT_EQ(other->get("a"), bytes("1"));
  EXPECT_EQ(one->add("n", 5), 5);
  EXPECT_EQ(other->add("n", -2), 3);
  EXPECT_EQ(other->get("n"), bytes("3"));
  EXPECT_TRUE(one->check({"a", "n"}));
  EXPECT_FALSE(one->check({"a", "b"}));
  EXPECT_EQ(one->compareSet("c", {}, bytes("first")), bytes("first"));
  EXPECT_EQ(one->compareSet("c", bytes("wrong"), bytes("second")), bytes("first"));
  EXPECT_EQ(one->compareSet("c", bytes("first"), bytes("second")), bytes("second"));
  one->append("c", bytes("!"));
  EXPECT_EQ(other->multiGet({"c", "a"}), (std::vector<std::vector<uint8_t>>{bytes("second!"), bytes("1")}));
  EXPECT_EQ(one->getNumKeys(), 3);
  EXPECT_TRUE(one->deleteKey("a"));
  EXPECT_FALSE(one->deleteKey("a"));
  one->set("empty", {});
  EXPECT_EQ(other->get("empty"), bytes(""));
  const std::vector<uint8_t> large(3 << 20, 7);
  one->set("large", large);
  EXPECT_EQ(other->get("large"), large);
  EXPECT_EQ(hub.server->statistics().connections, 2);
}

TEST(RunStore, WaitsAreWokenAtOnceAndTimedOutWaitsAreRemoved) {
  const Hub hub;
  const auto one = hub.connect(), other = hub.connect();
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(50));
    other->set("x", bytes("1"));
    other->set("y", bytes("2"));
  });
  EXPECT_EQ(one->multiGet({"x", "y"}), (std::vector<std::vector<uint8_t>>{bytes("1"), bytes("2")}));
  later.join();
  for (int i = 0; i < 50; ++i) {  // the answer and the cancellation may cross
    const std::string key = "late" + std::to_string(i);
    std::thread soon([&] {
      std::this_thread::sleep_for(milliseconds(2));
      other->set(key, bytes("v"));
    });
    try {
      one->wait({key}, milliseconds(2));
    } catch (const c10::DistStoreError& error) {
      EXPECT_THAT(error.what(), HasSubstr("late"));
    }
    soon.join();
    EXPECT_EQ(one->get(key), bytes("v"));
  }
}

TEST(RunStore, AnotherTokenOrRunIsRefusedWithTheReasonOnBothSides) {
  const Hub hub;
  ::testing::internal::CaptureStderr();
  try {
    hub.connect({.token = "wrong", .run = "nightly", .who = "rank 3 (process 77 on node4)"});
    ADD_FAILURE() << "was let in";
  } catch (const RunStoreRefusal& refusal) {
    EXPECT_EQ(refusal.why, RunStoreAnswer::kWrongToken);
    EXPECT_EQ(refusal.who, "rank 0");
    EXPECT_EQ(refusal.run, "") << "told to one who does not know the token";
  }
  try {
    hub.connect({.token = "t", .run = "weekly", .who = "rank 2"});
    ADD_FAILURE() << "was let in";
  } catch (const RunStoreRefusal& refusal) {
    EXPECT_EQ(refusal.why, RunStoreAnswer::kWrongRun);
    EXPECT_EQ(refusal.run, "nightly");
  }
  try {
    hub.connect({.token = "wrong", .run = "weekly", .who = "rank 4"});
    ADD_FAILURE() << "was let in";
  } catch (const RunStoreRefusal& refusal) {
    EXPECT_EQ(refusal.why, RunStoreAnswer::kWrongToken);
    EXPECT_EQ(refusal.run, "");
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("refused 'rank 3 (process 77 on node4)': it has another TESSERA_TOKEN than this run"));
  EXPECT_THAT(said, HasSubstr("refused 'rank 2': it is of run 'weekly', this is 'nightly'"));
  hub.connect()->set("still", bytes("works"));
}

TEST(RunStore, WorksOverIpv6) {
  std::string reason;
  const Hub hub({}, "::1");
  const auto store = hub.connect({}, "::1");
  EXPECT_EQ(store->add("n", 1), 1);
}

// The server closes a connection whose first message is not a valid hello. Other connections are not delayed.
TEST(RunStore, InvalidOrSilentConnectionsDoNotDelayOthers) {
  const Hub hub;
  std::string reason;
  std::vector<PeerSocket> guests;
  const auto deadline = std::chrono::steady_clock::now() + seconds(5);
  for (const std::string& text :
       {std::string("GET / HTTP/1.0\r\n\r\n"), std::string("\xff\xff\xff\x7f!"), std::string(4, '\0'),
        std::string("\x01\0\0\0\x63", 5), FrameWriter(RunStoreRequest::kSet).put("a").put("b").finish(),
        FrameWriter(RunStoreRequest::kHello).put(int64_t{kStoreMagic}).finish(), std::string()}) {
    guests.push_back(connect_to("127.0.0.1", hub.port, deadline, reason));
    ASSERT_TRUE(guests.back().open()) << reason;
    ::send(guests.back().descriptor(), text.data(), text.size(), MSG_NOSIGNAL);
  }
  const auto store = hub.connect();
  EXPECT_EQ(store->add("n", 1), 1);
  EXPECT_FALSE(store->check({"a"}));
  for (size_t i = 0; i + 1 < guests.size(); ++i) {
    std::vector<WatchdogFrame> frames;
    const auto until = std::chrono::steady_clock::now() + seconds(5);
    bool gone = false;
    while (!(gone = !guests[i].receive(frames)) && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_TRUE(gone) << "guest " << i;
  }
}

// Each connection announces a long hello and does not finish it.
TEST(RunStore, MemoryForUnauthenticatedConnectionsIsBounded) {
  const Hub hub;
  std::string reason;
  const uint32_t length = kMaxStoreHello - 1;
  std::string begun(reinterpret_cast<const char*>(&length), sizeof length);
  begun += std::string(length - 1, 'x');
  std::vector<PeerSocket> strangers;
  const auto deadline = std::chrono::steady_clock::now() + seconds(20);
  for (int i = 0; i < 300; ++i) {  // 19 MiB in all
    strangers.push_back(connect_to("127.0.0.1", hub.port, deadline, reason));
    ASSERT_TRUE(strangers.back().open()) << reason;
    for (std::string_view rest = begun; !rest.empty();) {
      const ssize_t sent = ::send(strangers.back().descriptor(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) rest.remove_prefix(static_cast<size_t>(sent));
      if (sent < 0 && errno != EAGAIN) break;  // the server has closed the connection
    }
    EXPECT_LE(hub.server->statistics().unauthenticated_bytes, int64_t{16} << 20);
  }
  const auto store = hub.connect();
  EXPECT_EQ(store->add("n", 1), 1);
  const auto until = std::chrono::steady_clock::now() + seconds(5);
  while (hub.server->statistics().unauthenticated_bytes < int64_t{15} << 20 &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_GT(hub.server->statistics().unauthenticated_bytes, int64_t{15} << 20);
  strangers.clear();
  while (hub.server->statistics().unauthenticated_bytes > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(hub.server->statistics().unauthenticated_bytes, 0);
}

TEST(RunStore, WaitsWithoutFreeDescriptorsAndResumesLater) {
  const Hub hub;
  const auto known = hub.connect();
  const UniqueFd guest(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(hub.port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto cpu_seconds = [] {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
  };
  {
    const testing::FewDescriptors none;
    EXPECT_EQ(::connect(guest.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);  // queued
    const double begun = cpu_seconds();
    std::this_thread::sleep_for(milliseconds(800));
    EXPECT_LT(cpu_seconds() - begun, 0.2) << "it asks again and again";
    EXPECT_EQ(known->add("n", 1), 1) << "who is in is served";
  }
  EXPECT_EQ(hub.connect()->add("n", 1), 2);
}

TEST(RunStore, TooLargeAnswerClosesOnlyTheConnectionOfItsCaller) {
  const Hub hub;
  const auto setter = hub.connect();
  setter->set("x", std::vector<uint8_t>(40 << 20, 1));
  const auto asks = [&](const std::vector<std::string>& keys) {
    try {
      hub.connect()->multiGet(keys);
      return std::string("answered");
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  };
  std::string large, small;
  std::thread one([&] { large = asks({"x", "y"}); });
  std::thread other([&] { small = asks({"y"}); });
  while (hub.server->statistics().requests < 3) std::this_thread::sleep_for(milliseconds(5));
  setter->set("y", std::vector<uint8_t>(30 << 20, 1));
  EXPECT_EQ(setter->add("n", 1), 1);
  one.join();
  other.join();
  EXPECT_THAT(large, HasSubstr("lost the connection to rank 0"));
  EXPECT_EQ(small, "answered");
}

TEST(RunStore, ServerShutdownEndsAWait) {
  Hub hub;
  const auto store = hub.connect();
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(50));
    hub.server.reset();
  });
  EXPECT_THROW(store->get("never"), c10::DistNetworkError);
  later.join();
}

}  // namespace
}  // namespace tessera::comm
