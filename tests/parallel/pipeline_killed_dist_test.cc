// A rank of a pipeline that is killed as a process, in the middle of a step: the others end in time and name it.
#include <gmock/gmock.h>

#include "tests/comm/fleet.h"
#include "tests/parallel/pipeline_model.h"
#include "tests/support/prompt.h"

namespace tessera::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

void expect_all_name_the_killed(const std::string& backend, int victim) {
  constexpr int kRanks = 3;
  comm::Fleet fleet(kRanks, {.backend = backend, .timeout = std::chrono::seconds(60)}, [](const WorldPtr& world) {
    const auto batches = documents(6, 8);
    PipelineRig rig(layers(kRanks), {.mesh = stages_mesh(world)});
    rig.pipeline->step(here(batches));
    comm::Fleet::ready();
    for (;;) rig.pipeline->step(here(batches));
  });
  ASSERT_TRUE(fleet.await_ready());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double killed = comm::clock_seconds();
  fleet.send(victim, SIGKILL);
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

// The middle one and an end: of these the other end hears through a rank that fails itself.
TEST(PipelineKilled, EveryOtherRankNamesIt) {
  expect_all_name_the_killed("gloo", 1);
  expect_all_name_the_killed("shm", 2);
}

}  // namespace
}  // namespace tessera::testing
