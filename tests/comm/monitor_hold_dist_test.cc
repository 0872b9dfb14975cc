// Monitor::hold(): a process whose peer has died is not ended before work that needs no peer is finished.
#include <gtest/gtest.h>

#include <thread>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/watch/monitor.h"
#include "tests/comm/fleet.h"

namespace tessera::comm {
namespace {

TEST(MonitorHold, HeldWorkIsFinishedBeforeTheProcessIsTerminated) {
  const testing::TempFolder folder;
  Fleet fleet(3, {}, [&](const auto& world) {
    barrier(*world->group());
    // Rank 0 publishes a file for longer than the monitor lets a rank without collectives live. Rank 2 has no such
    // work.
    std::thread publisher;
    if (world->rank() == 0) {
      publisher = std::thread([&, hold = world->monitor().hold()] {
        std::this_thread::sleep_for(Monitor::kGrace + std::chrono::seconds(3));
        publish_file(folder / "published", "whole");
      });
    }
    Fleet::ready();
    std::this_thread::sleep_for(std::chrono::seconds(50));
    if (publisher.joinable()) publisher.join();
  });
  ASSERT_TRUE(fleet.await_ready());
  fleet.send(1, SIGKILL);
  for (const int rank : {0, 2}) EXPECT_EQ(fleet.end_of(rank).code, 4) << fleet.end_of(rank).text;
  ASSERT_TRUE(std::filesystem::exists(folder / "published"));
  EXPECT_EQ(read_file(folder / "published"), "whole");
  EXPECT_LT(fleet.end_of(2).time, fleet.end_of(0).time);
}

}  // namespace
}  // namespace tessera::comm
