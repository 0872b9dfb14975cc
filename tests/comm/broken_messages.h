// Messages and collectives over Gloo whose bytes were on their way when the other rank was killed. Gloo leaves those
// waits standing until the time-out of the group (tessera/comm/watch/end_broken_message.h): a rank that already has its
// error must not wait there without a word.
#pragma once

#include <fstream>

#include "tessera/comm/errors/peer_failed.h"
#include "tests/comm/fleet.h"
#include "tests/comm/killed_ranks.h"

namespace tessera::comm {
namespace broken_messages {

inline constexpr int64_t kMoreThanSocketsHold = 32 << 20;
inline constexpr int kBigTag = 1, kSmallTag = 2, kOtherTag = 3;

inline bool is_stopped(int process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  const std::string line((std::istreambuf_iterator<char>(file)), {});
  const size_t name_end = line.rfind(") ");
  return name_end != line.npos && line[name_end + 2] == 'T';
}

// In rank 1: nothing of this process goes on, and its connections stay open, until it is killed.
inline void stop(World& world) {
  const std::string process = std::to_string(::getpid());
  world.store().set("stopped", std::vector<uint8_t>(process.begin(), process.end()));
  Fleet::ready();
  ::raise(SIGSTOP);
}

inline void await_stop_of_the_other(World& world) {
  const int process = std::stoi(world.store().get_to_str("stopped"));
  while (!is_stopped(process)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Kills rank 1 once it is stopped and rank 0 has begun `under_way`, which rank 1 has posted in `posts`. Rank 0 then
// hears of the death in a receive, and must end within the limit.
struct Case {
  const char* name;
  std::function<std::vector<PendingCollective>(Group&)> posts, under_way;
  std::function<void(Group&, std::vector<PendingCollective>)> fails;  // in rank 0
};

inline Fleet::End end_of_rank_0(const Case& one) {
  Fleet fleet(2, {.timeout = std::chrono::seconds(60)}, [&](const std::shared_ptr<World>& world) {
    Group& group = *world->group();
    barrier(group);
    if (world->rank() == 1) {
      const auto posted = one.posts(group);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until Gloo's threads have told rank 0
      stop(*world);
      return;
    }
    await_stop_of_the_other(*world);
    auto under_way = one.under_way(group);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until the sockets are full
    Fleet::ready();
    one.fails(group, std::move(under_way));
  });
  EXPECT_TRUE(fleet.await_ready());
  const double killed = clock_seconds();
  fleet.send(1, SIGKILL);
  auto end = fleet.end_of(0);
  end.time -= killed;
  return end;
}

inline at::Tensor big() { return at::zeros({kMoreThanSocketsHold}, at::kByte); }

inline std::vector<PendingCollective> one_of(PendingCollective pending) {
  std::vector<PendingCollective> all;
  all.push_back(std::move(pending));
  return all;
}

// The call in which rank 0 learns that rank 1 has ended.
inline void fail(Group& group) { recv(group, at::zeros({1}), 1, kSmallTag).wait(); }

inline std::vector<PendingCollective> post_receive(Group& group) { return one_of(recv(group, big(), 0, kBigTag)); }
inline std::vector<PendingCollective> send_big(Group& group) { return one_of(send(group, big(), 1, kBigTag)); }

// Rank 0 ends in time, with code 4 and the name of the other one.
inline void expect_prompt_end(const Case& one, const std::string& more = "") {
  SCOPED_TRACE(one.name);
  const auto end = end_of_rank_0(one);
  EXPECT_EQ(end.code, 4) << end.text;
  EXPECT_LT(end.time, testing::kPromptSeconds);
  EXPECT_THAT(end.text, ::testing::HasSubstr("rank 1 has ended without an error message"));
  EXPECT_THAT(end.text, ::testing::HasSubstr(more));
}

}  // namespace broken_messages
}  // namespace tessera::comm
