// 200 of the random kills of shm_fault_dist_test.cc.
#include "tests/comm/shm_faults.h"

namespace tessera::comm {
namespace {

TEST(ShmFaultSlow, RankKilledAtARandomTimeIsNamedByTheOthers) {
  for (uint32_t seed = 1000; seed < 1200; ++seed) testing_faults::kill_at_random(seed);
}

}  // namespace
}  // namespace tessera::comm
