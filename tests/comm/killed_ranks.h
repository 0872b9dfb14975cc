// SIGKILL at random times of a run. The survivors must end within kPromptSeconds and name the killed rank.
#pragma once

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tessera/comm/collectives/collectives.h"
#include "tests/comm/fleet.h"
#include "tests/support/prompt.h"

namespace tessera::comm {

// Endless collectives of many kinds.
inline void communicate(World& world) {
  Group& group = *world.group();
  const auto pair = world.new_group({world.rank() & ~1, world.rank() | 1}, "pair");
  for (int64_t step = 0;; ++step) {
    at::Tensor sum = at::ones({1 + step % 7 * 1000}), all = at::empty({group.size() * 16}), part = at::empty({16});
    all_gather_into(group, all, part, "weights").wait();
    PendingCollective later = reduce_scatter_into(group, part, all, ReduceOp::kSum, "gradients");
    all_reduce(*pair, sum).wait();
    later.wait();
    broadcast(group, sum, static_cast<int>(step % group.size())).wait();
    barrier(group);
  }
}

inline void expect_survivors_to_notice(int rounds, unsigned seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    const int size = 2 << (round % 2), victim = static_cast<int>(random() % static_cast<unsigned>(size));
    // In a quarter of the rounds the kill comes while the second group is made.
    const auto delay = std::chrono::microseconds(random() % (round / 2 % 4 == 0 ? 3'000 : 150'000));
    SCOPED_TRACE(fmt::format("seed {}, round {}: rank {} of {} after {} us", seed, round, victim, size, delay.count()));
    Fleet fleet(size, {.timeout = std::chrono::seconds(60)}, [](const auto& world) {
      barrier(*world->group());
      Fleet::ready();
      communicate(*world);
    });
    ASSERT_TRUE(fleet.await_ready());
    std::this_thread::sleep_for(delay);
    const double killed = clock_seconds();
    fleet.send(victim, SIGKILL);
    for (int rank = 0; rank < size; ++rank) {
      const auto& end = fleet.end_of(rank);
      if (rank == victim) {
        EXPECT_EQ(end.code, 128 + SIGKILL);
        continue;
      }
      EXPECT_EQ(end.code, 4) << "rank " << rank << ": " << end.text;
      EXPECT_LT(end.time - killed, testing::kPromptSeconds) << "rank " << rank;
      EXPECT_THAT(end.text, ::testing::HasSubstr(fmt::format("rank {} has ended without an error message", victim)))
          << "rank " << rank;
    }
  }
}

}  // namespace tessera::comm
