// Test that a run which is killed at any time resumes to the same bits.
#include "tests/train/kills.h"

namespace tessera::train {
namespace {

TEST(Kills, RunKilledAtARandomTimeResumesBitwise) {
  const unsigned seed = std::random_device{}();
  const auto count = kill_and_resume(5, seed, 6);
  std::printf("seed %u: %d kills, %d inside a save\n", seed, count.kills, count.inside_saves);
  EXPECT_GE(count.kills, 5);
  EXPECT_GE(count.inside_saves * 2 + 1, count.kills);
}

}  // namespace
}  // namespace tessera::train
