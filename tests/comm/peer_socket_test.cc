// Connections of the watchdog that are slow, that send nothing, or that are too many.
#include "tessera/comm/watch/peer_socket.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include "tessera/base/machine/listen.h"
#include "tests/support/few_descriptors.h"

namespace tessera::comm {
namespace {

using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

UniqueFd connected(int port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return socket;
}

TEST(PeerSocket, UnsentFramesAreBufferedAndArriveComplete) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  PeerSocket sender{UniqueFd(ends[0])}, receiver{UniqueFd(ends[1])};
  const std::string text(100'000, 'x');
  constexpr int kFrames = 20;  // more bytes than a socket's buffer holds
  for (int i = 0; i < kFrames; ++i) ASSERT_TRUE(sender.send({WatchdogFrameKind::kRecord, i, text})) << i;
  EXPECT_TRUE(sender.has_unsent());
  std::vector<WatchdogFrame> frames;
  for (const auto limit = Clock::now() + seconds(20); frames.size() < kFrames && Clock::now() < limit;) {
    ASSERT_TRUE(receiver.receive(frames));
    ASSERT_TRUE(sender.flush());
  }
  ASSERT_EQ(frames.size(), size_t{kFrames});
  for (int i = 0; i < kFrames; ++i) {
    EXPECT_EQ(frames[i].rank, i);
    EXPECT_TRUE(frames[i].text == text);
  }
  EXPECT_FALSE(sender.has_unsent());
}

TEST(PeerSocket, PeerThatNeverReadsIsTreatedAsDisconnected) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  PeerSocket sender{UniqueFd(ends[0])};
  const UniqueFd other(ends[1]);
  const std::string text(1'000'000, 'x');
  bool open = true;
  for (int i = 0; i < 30 && open; ++i) open = sender.send({WatchdogFrameKind::kRecord, 0, text});
  EXPECT_FALSE(open);
  std::vector<WatchdogFrame> frames;
  EXPECT_FALSE(sender.receive(frames));
}

// One connection after the other with a limit of 5 s each would delay the sending connection by 200 s.
TEST(ConnectionAcceptor, SilentConnectionsDoNotDelayOthers) {
  ListeningSocket here = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 40; ++i) silent.push_back(connected(here.port));
  PeerSocket speaks(connected(here.port));
  speaks.send({WatchdogFrameKind::kHello, 7, "here"});
  ConnectionAcceptor reception(std::move(here.socket));
  const auto [socket, frames] = reception.next(Clock::now() + seconds(20));
  ASSERT_TRUE(socket.open());
  EXPECT_EQ(frames.at(0).rank, 7);
}

TEST(ConnectionAcceptor, SilentConnectionsAreClosedWithoutFreeDescriptors) {
  ListeningSocket here = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 30; ++i) silent.push_back(connected(here.port));
  PeerSocket speaks(connected(here.port));
  speaks.send({WatchdogFrameKind::kHello, 7, "here"});
  ConnectionAcceptor reception(std::move(here.socket));
  const testing::FewDescriptors few(4);
  const auto [socket, frames] = reception.next(Clock::now() + seconds(20));
  ASSERT_TRUE(socket.open());
  EXPECT_EQ(frames.at(0).rank, 7);
}

}  // namespace
}  // namespace tessera::comm
