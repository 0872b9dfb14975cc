// Slow test: 200 kills of training runs at random times.
#include "tests/train/kills.h"

namespace tessera::train {
namespace {

TEST(Kills, RunsKilledTwoHundredTimesResumeBitwise) {
  const char* text = std::getenv("TESSERA_KILLS");
  const unsigned seed = std::random_device{}();
  const auto count = kill_and_resume(text ? std::atoi(text) : 200, seed, 12);
  std::printf("seed %u: %d kills, %d inside a save", seed, count.kills, count.inside_saves);
  for (const auto& [role, kills] : count.victims) std::printf(", %s %d", role.c_str(), kills);
  std::printf("\n");
  EXPECT_GE(count.inside_saves * 2 + 1, count.kills);
  EXPECT_EQ(count.victims.size(), 3u);
}

}  // namespace
}  // namespace tessera::train
