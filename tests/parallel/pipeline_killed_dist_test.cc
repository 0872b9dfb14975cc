// Tests of pipelines in which the process of one rank is killed during a step: the other ranks end in time, and their
// errors name the killed rank.
#include <gmock/gmock.h>

#include <cstdlib>
#include <random>

#include "tests/comm/fleet.h"
#include "tests/parallel/pipeline_model.h"
#include "tests/support/prompt.h"

namespace tessera::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

struct KillTiming {
  std::chrono::microseconds after = std::chrono::milliseconds(50);  // from ready() to SIGKILL
  // The rank before the victim is stopped (SIGSTOP) for this time, then the victim is killed. The stopped rank then
  // reads the victim's last messages after the victim's end.
  std::chrono::microseconds unheard{0};
};

void expect_others_report_the_killed_rank(const std::string& backend, int victim, const KillTiming& timing = {}) {
  constexpr int kRanks = 3;
  comm::Fleet fleet(kRanks, {.backend = backend, .timeout = std::chrono::seconds(60)}, [](const WorldPtr& world) {
    const auto batches = documents(6, 8);
    PipelineRig rig(layers(kRanks), {.mesh = stages_mesh(world)});
    rig.pipeline->step(here(batches));
    comm::Fleet::ready();
    for (;;) rig.pipeline->step(here(batches));
  });
  ASSERT_TRUE(fleet.await_ready());
  std::this_thread::sleep_for(timing.after);
  const bool stops = timing.unheard.count() > 0;
  const int before = (victim + kRanks - 1) % kRanks;
  if (stops) fleet.send(before, SIGSTOP);
  std::this_thread::sleep_for(timing.unheard);
  const double killed = comm::clock_seconds();
  fleet.send(victim, SIGKILL);
  if (stops) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until its connections are closed
    fleet.send(before, SIGCONT);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto& end = fleet.end_of(rank);
    if (rank == victim) {
      EXPECT_EQ(end.code, 128 + SIGKILL);
      continue;
    }
    EXPECT_EQ(end.code, 4) << backend << ", rank " << rank << ": " << end.text;
    EXPECT_LT(end.time - killed, kPromptSeconds) << backend << ", rank " << rank;
    EXPECT_THAT(end.text, AnyOf(HasSubstr(fmt::format("rank {} has ended", victim)),
                                HasSubstr(fmt::format("rank {} (process ", victim))))
        << backend << ", rank " << rank;
  }
}

// The killed rank is a middle rank or an end. When an end is killed, the other end gets the failure from a rank that
// fails itself.
TEST(PipelineKilled, EveryOtherRankReportsTheKilledRank) {
  expect_others_report_the_killed_rank("gloo", 1);
  expect_others_report_the_killed_rank("shm", 2);
}

// If a rank is killed while a message to it begins, Gloo's wait for that message does not return.
TEST(PipelineKilled, EveryOtherRankReportsARankKilledAtARandomTime) {
  const char* count = std::getenv("TESSERA_TEST_KILLED_RANKS");
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (int round = 0; round < (count ? std::atoi(count) : 1); ++round) {
    const int victim = static_cast<int>(random() % 3);
    const KillTiming timing{.after = std::chrono::microseconds(random() % 100'000),
                            .unheard = std::chrono::microseconds(random() % 4 == 0 ? 0 : random() % 20'000)};
    SCOPED_TRACE(fmt::format("seed {}, round {}: rank {} after {} us, unheard for {} us", seed, round, victim,
                             timing.after.count(), timing.unheard.count()));
    expect_others_report_the_killed_rank("gloo", victim, timing);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::testing
