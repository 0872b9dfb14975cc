// Messages and collectives over Gloo whose bytes are in transit when the other rank is killed. Gloo leaves waits for
// such messages blocked until the group's timeout (tessera/comm/watch/end_broken_message.h). A rank that already has
// its error must not block in such a wait without a message.
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

// Runs in rank 1: stops all threads of the process until it is killed. Its connections stay open.
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

// One case. Rank 1 starts the calls of `posts` and stops. Rank 0 starts the matching calls of `under_way`, and rank 1
// is killed. A receive of rank 0 reports the death, and the process of rank 0 must end within the limit.
struct Case {
  const char* name;
  std::function<std::vector<PendingCollective>(Group&)> posts, under_way;
  std::function<void(Group&, std::vector<PendingCollective>)> fails;  // called in rank 0
};

inline Fleet::End end_of_rank_0(const Case& one) {
  Fleet fleet(2, {.timeout = std::chrono::seconds(60)}, [&](const std::shared_ptr<World>& world) {
    Group& group = *world->group();
    barrier(group);
    if (world->rank() == 1) {
      const auto posted = one.posts(group);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until Gloo's threads have notified rank 0
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

// Receives from rank 1. The error of this call reports to rank 0 that rank 1 has ended.
inline void fail(Group& group) { recv(group, at::zeros({1}), 1, kSmallTag).wait(); }

inline std::vector<PendingCollective> post_receive(Group& group) { return one_of(recv(group, big(), 0, kBigTag)); }
inline std::vector<PendingCollective> send_big(Group& group) { return one_of(send(group, big(), 1, kBigTag)); }

// Expects that rank 0 ends in time, with exit code 4 and a message that names rank 1.
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
