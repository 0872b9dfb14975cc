// Two hundred killed ranks over Gloo: every survivor must name the killed rank. faults_dist_test.cc kills fewer.
#include "tests/comm/killed_ranks.h"

namespace tessera::comm {
namespace {

TEST(Faults, TwoHundredKilledRanksAreNamedByEverySurvivor) { expect_survivors_to_notice(200, std::random_device()()); }

}  // namespace
}  // namespace tessera::comm
