// The control plane with a hundred ranks: all ranks meet and watch each other, and rank 0 needs few descriptors.
#include <gtest/gtest.h>

#include "tests/comm/control_plane.h"

namespace tessera::comm {
namespace {

TEST(ControlPlane, HundredRanksStayWithinStoreAndDescriptorLimits) {
  const ControlPlane found = run_control_plane(104, 8);
  EXPECT_EQ(found.ended_well, 104);
  EXPECT_LT(found.store_bytes / 104, 4096);
  EXPECT_LT(found.store_requests / 104, 24);
  EXPECT_LT(found.descriptors, 2 * 104 + 64);  // one connection for the store and one for the watchdog
}

}  // namespace
}  // namespace tessera::comm
