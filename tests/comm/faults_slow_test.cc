#include "tests/comm/killed_ranks.h"

namespace tessera::comm {
namespace {

TEST(Faults, TwoHundredKilledRanksAreNamedByEverySurvivor) { expect_survivors_to_notice(200, std::random_device()()); }

}  // namespace
}  // namespace tessera::comm
