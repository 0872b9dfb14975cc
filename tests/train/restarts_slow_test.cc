// Slow test: 100 killed ranks do not change a bit of the result.
#include "tests/train/restarts.h"

namespace tessera::train {
namespace {

TEST(RestartsSlow, HundredKilledRanksDoNotChangeTheResult) {
  const char* count = std::getenv("TESSERA_TEST_KILLED_RANKS");
  expect_run_survives_kills(count ? std::atoi(count) : 100, 8, std::random_device{}(), 12);
}

}  // namespace
}  // namespace tessera::train
