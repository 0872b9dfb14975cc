// Slow tests of checkpoints: 2000 saves leave nothing in store and memory, and 200 killed saves lose no published
// checkpoint.
#include "tests/checkpoint/killed_saves.h"
#include "tests/checkpoint/many_saves.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::RankMode;

void save_often(RankMode mode) {
  testing::run_ranks({.size = 4, .mode = mode, .limit_seconds = 2800},
                     [](const auto& world) { expect_no_growth(world, 2000, 6144); });
}

TEST(Saves, TwoThousandDoNotGrowStoreOrMemoryOfThreads) { save_often(RankMode::kThreads); }
TEST(Saves, TwoThousandDoNotGrowStoreOrMemoryOfProcesses) { save_often(RankMode::kProcesses); }

TEST(KilledSaves, TwoHundredKeepPublishedCheckpointsComplete) {
  const unsigned seed = std::random_device{}();
  const auto count = kill_saves(200, seed);
  std::printf("seed %u: %d kills, %d of all ranks, %d inside a save\n", seed, count.kills, count.of_all,
              count.inside_saves);
  EXPECT_EQ(count.kills, 200);
  EXPECT_GE(count.inside_saves, 50);  // usually about 100; fewer on busy cores
}

}  // namespace
}  // namespace tessera
