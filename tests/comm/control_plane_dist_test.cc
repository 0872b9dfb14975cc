#include <gtest/gtest.h>

#include "tests/comm/control_plane.h"

namespace tessera::comm {
namespace {

TEST(ControlPlane, HundredRanksMeetAndWatchOverOneAnother) {
  const ControlPlane found = run_control_plane(104, 8);
  EXPECT_EQ(found.ended_well, 104);
  EXPECT_LT(found.store_bytes / 104, 4096);
  EXPECT_LT(found.store_requests / 104, 24);
  EXPECT_LT(found.descriptors, 2 * 104 + 64);  // a connection for the store and one for the watch
}

}  // namespace
}  // namespace tessera::comm
