// SIGKILL at a random time of a rank's life: while it meets the others, makes groups, communicates or ends. The
// survivors must end within the limit. Survivors that still needed the rank must end with a communication error.
#pragma once

#include <cmath>
#include <random>

#include "tests/comm/killed_ranks.h"

namespace tessera::comm {

struct KilledRank {
  int size = 2, victim = 0;
  bool over_files = false;  // true: files, as under `tessera launch`; false: the store of rank 0
  std::string backend = "gloo";
  std::chrono::microseconds after{};  // time of the kill, after the start of the ranks
};

inline KilledRank draw_killed_rank(std::mt19937& random) {
  KilledRank drawn;
  drawn.size = 2 + static_cast<int>(random() % 3);
  drawn.victim = static_cast<int>(random() % static_cast<unsigned>(drawn.size));
  drawn.over_files = random() % 2 == 0;
  drawn.backend = random() % 3 == 0 ? "shm" : "gloo";
  // The delays are log-uniform, so that early and late kills are equally frequent. On a quiet machine connecting takes
  // milliseconds and the whole life of a rank half a second.
  const double part = std::uniform_real_distribution<double>(0, 1)(random);
  drawn.after = std::chrono::microseconds(static_cast<int64_t>(500 * std::pow(1000, part)));
  return drawn;
}

// Kills the rank, checks the survivors, and returns the seconds until the last survivor has ended.
inline double expect_survivors_to_end(const KilledRank& killed) {
  const testing::TempFolder folder;
  Fleet fleet(
      killed.size, {.backend = killed.backend, .timeout = std::chrono::seconds(8)},
      [](const std::shared_ptr<World>& world) {
        Group& group = *world->group();
        at::Tensor sum = at::ones({3000}), all = at::empty({group.size() * 16}), part = at::empty({16});
        const int next = (group.rank() + 1) % group.size(), last = (group.rank() + group.size() - 1) % group.size();
        for (int step = 0; step < 20; ++step) {
          PendingCollective sent = send(group, sum, next, step), received = recv(group, at::empty({3000}), last, step);
          all_gather_into(group, all, part).wait();
          PendingCollective later = reduce_scatter_into(group, part, all);
          received.wait();
          later.wait();
          sent.wait();
          broadcast(group, sum, step % group.size()).wait();
        }
      },
      free_port(),
      [&](int) {
        if (killed.over_files) ::setenv("TESSERA_RENDEZVOUS", ("file:" + folder.path().string()).c_str(), 1);
      });
  std::this_thread::sleep_for(killed.after);
  const double begun = clock_seconds();
  fleet.send(killed.victim, SIGKILL);
  const bool was_alive = fleet.end_of(killed.victim).code == 128 + SIGKILL;
  double longest = 0;
  for (int rank = 0; rank < killed.size; ++rank) {
    if (rank == killed.victim) continue;
    const auto& end = fleet.end_of(rank);
    longest = std::max(longest, end.time - begun);
    EXPECT_LT(end.time - begun, testing::kPromptSeconds) << "rank " << rank;
    if (!was_alive || end.code == 0) {  // the victim had ended, or no rank needed it any more
      EXPECT_EQ(end.code, 0) << "rank " << rank << ": " << end.text;
      continue;
    }
    EXPECT_EQ(end.code, 4) << "rank " << rank << ": " << end.text;
    // Before the watchdog runs, a survivor may only see that a third rank failed, which waited in vain for the victim.
    // The message then does not name the victim.
    EXPECT_THAT(end.text, ::testing::HasSubstr("[comm.")) << "rank " << rank;
  }
  return longest;
}

inline void expect_survivors_of_all_phases_to_end(int rounds, unsigned seed) {
  std::mt19937 random(seed);
  double longest = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto killed = draw_killed_rank(random);
    SCOPED_TRACE(fmt::format("seed {}, round {}: rank {} of {} over {}, {}, after {} us", seed, round, killed.victim,
                             killed.size, killed.backend, killed.over_files ? "files" : "a store",
                             killed.after.count()));
    longest = std::max(longest, expect_survivors_to_end(killed));
    if (::testing::Test::HasFailure()) return;
  }
  std::printf("seed %u: %d ranks killed, the last survivor ended %.1f s later at most\n", seed, rounds, longest);
}

}  // namespace tessera::comm
