// Test of killed saves: the checkpoints that were published stay complete.
#include "tests/checkpoint/killed_saves.h"

namespace tessera {
namespace {

TEST(KilledSaves, KeepPublishedCheckpointsComplete) {
  const unsigned seed = std::random_device{}();
  const auto count = kill_saves(20, seed);
  std::printf("seed %u: %d kills, %d of all ranks, %d inside a save\n", seed, count.kills, count.of_all,
              count.inside_saves);
  EXPECT_EQ(count.kills, 20);
  EXPECT_GE(count.inside_saves, 5);
}

}  // namespace
}  // namespace tessera
