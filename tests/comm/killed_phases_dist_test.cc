// SIGKILL at random times of a rank's life. killed_phases_slow_test.cc kills more ranks.
#include "tests/comm/killed_phases.h"

namespace tessera::comm {
namespace {

TEST(KilledPhases, SurvivorsExitWheneverARankIsKilled) {
  const char* rounds = std::getenv("TESSERA_TEST_KILLED_RANKS");
  expect_survivors_of_all_phases_to_end(rounds ? std::atoi(rounds) : 2, std::random_device()());
}

}  // namespace
}  // namespace tessera::comm
