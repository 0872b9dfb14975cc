// Ranks that die while groups are made. The ranks use the launcher's file store: the end of a connection does not wake
// its readers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/fleet.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

// Makes a rank meet the others through files, as under `tessera launch`.
std::function<void(int)> over_files(const testing::TempFolder& folder) {
  return [path = folder.path().string()](int) { ::setenv("TESSERA_RENDEZVOUS", ("file:" + path).c_str(), 1); };
}

void expect_others_to_name(Fleet& fleet, int size, int victim) {
  ASSERT_TRUE(fleet.await_ready());
  const double killed = clock_seconds();
  for (int rank = 0; rank < size; ++rank) {
    const auto& end = fleet.end_of(rank);
    if (rank == victim) continue;
    EXPECT_EQ(end.code, 4) << "rank " << rank << ": " << end.text;
    EXPECT_LT(end.time - killed, 20) << "rank " << rank;  // the groups' timeout is 60 s
    EXPECT_THAT(end.text, HasSubstr(fmt::format("rank {} has ended without an error message", victim)))
        << "rank " << rank;
    EXPECT_THAT(end.text, HasSubstr("[comm.new_group] group 'late'")) << "rank " << rank;
  }
}

// Rank `victim` dies before it makes the second group. The other ranks wait in the handshake for its message.
TEST(GroupMaking, EveryRankNamesTheRankThatDiesInTheHandshake) {
  for (const std::string backend : {"shm", "gloo"}) {
    for (const int victim : {0, 2}) {
      SCOPED_TRACE(fmt::format("{}, rank {} dies", backend, victim));
      const testing::TempFolder folder;
      Fleet fleet(
          3, {.backend = backend, .timeout = std::chrono::seconds(60)},
          [&](const std::shared_ptr<World>& world) {
            world->group();
            Fleet::ready();
            if (world->rank() == victim) ::raise(SIGKILL);
            world->new_group({0, 1, 2}, "late");
          },
          0, over_files(folder));
      expect_others_to_name(fleet, 3, victim);
    }
  }
}

// Before the watchdog runs, only a timeout shows that a rank is missing. All ranks must name the missing rank, whether
// the store outlives rank 0 (files) or ends with it.
TEST(GroupMaking, RankThatDiesBetweenRendezvousAndWatchdogIsNamedByAll) {
  for (const bool files : {true, false}) {
    SCOPED_TRACE(files ? "store in files" : "store in rank 0");
    const testing::TempFolder folder;
    Fleet fleet(
        4, {.timeout = std::chrono::seconds(4)}, [](const std::shared_ptr<World>& world) { world->group(); },
        free_port(),
        [&](int rank) {
          if (files) over_files(folder)(rank);
          if (rank != 2) return;
          // This rank joins the meeting, and dies before the watchdog starts.
          auto meeting = find_rendezvous({}, process_environment());
          meet(meeting, std::chrono::seconds(30));
          ::raise(SIGKILL);
        });
    for (const int rank : {0, 1, 3}) {
      const auto& end = fleet.end_of(rank);
      EXPECT_EQ(end.code, 4) << end.text;
      EXPECT_THAT(end.text, HasSubstr("rank 2 of 4 did not connect in time")) << "rank " << rank;
    }
  }
}

}  // namespace
}  // namespace tessera::comm
