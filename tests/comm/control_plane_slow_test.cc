// The cost of the control plane with 1,000 hosts of 8 ranks. The test prints the figures and compares them with the
// limits of the design.
#include <gtest/gtest.h>

#include "tessera/comm/backends/fake_backend.h"
#include "tests/comm/control_plane.h"

namespace tessera::comm {
namespace {

TEST(ControlPlaneSlow, RendezvousOfAThousandHostsTakesUnderTenSeconds) {
  const char* given = std::getenv("TESSERA_TEST_RANKS");
  const int size = given ? std::atoi(given) : 8000;
  const ControlPlane found = run_control_plane(size, 8);
  std::printf("%d ranks: met in %.2f s, watched %.2f s later\n", size, found.meeting_seconds, found.watch_seconds);
  std::printf("store: %.1f requests and %.0f bytes a rank; rank 0: %.1f MiB more, %.0f descriptors\n",
              found.store_requests / size, found.store_bytes / size, found.memory_bytes / 1048576, found.descriptors);
  std::printf("watch at rest: %.2f of a core on rank 0's process, %.0f KiB/s over all\n", found.watch_cpu_share,
              found.watch_bytes_a_second / 1024);
  ASSERT_EQ(found.ended_well, size);
  EXPECT_LT(found.meeting_seconds, 10);
  EXPECT_LT(found.memory_bytes / size, 32 << 10);
  EXPECT_LT(found.store_bytes / size, 4096);
  EXPECT_LT(found.descriptors, 2 * size + 64);
}

// One rank makes groups like those of all mesh dimensions. Neither time nor memory may grow with the square of the
// world size.
TEST(ControlPlaneSlow, MemoryOfGroupsIsLinearInTheWorldSize) {
  for (const int hosts : {125, 1000}) {
    const int size = hosts * 8;
    const double before = scale::resident_bytes(), start = clock_seconds();
    const auto world = World::create_fake(size / 2, size, std::make_shared<FakeCostAccount>());
    std::vector<std::shared_ptr<Group>> groups = {world->group()};
    std::vector<int> across;
    for (int host = 0; host < hosts; ++host) across.push_back(host * 8 + size / 2 % 8);
    for (int i = 0; i < 32; ++i) groups.push_back(world->new_group(across, "dp" + std::to_string(i)));
    const FlightRecord record = world->monitor().recorder().record("asked");
    const double seconds = clock_seconds() - start, bytes = scale::resident_bytes() - before;
    std::printf("%d ranks: 33 groups in %.1f ms and %.0f KiB\n", size, seconds * 1e3, bytes / 1024);
    EXPECT_LT(bytes, 64.0 * 33 * size);
  }
}

}  // namespace
}  // namespace tessera::comm
