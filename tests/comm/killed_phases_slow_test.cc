// SIGKILL at random times of a rank's life, 300 times. killed_phases_dist_test.cc is the short version.
#include "tests/comm/killed_phases.h"

namespace tessera::comm {
namespace {

TEST(KilledPhases, SurvivorsExitWheneverOneOfThreeHundredRanksIsKilled) {
  expect_survivors_of_all_phases_to_end(300, std::random_device()());
}

}  // namespace
}  // namespace tessera::comm
