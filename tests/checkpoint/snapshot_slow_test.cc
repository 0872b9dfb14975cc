// Tests of a rank that fails between a save and its next update, while its peers are in a step that needs this rank.
#include <gmock/gmock.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/parallel/small_model.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

void save_and_fail_alone(const WorldPtr& world, const std::filesystem::path& folder) {
  CheckpointWriter writer({.folder = folder, .world = world, .keep_last = 0, .defer_copy = true});
  writer.save(1, {{"model.w", at::ones({4})}}, {});
  TESSERA_CHECK(world->rank() != 1, ErrorKind::kIo, "the forward failed");
  comm::barrier(*world->group());  // rank 1 does not take part in this step
}

void fail_alone(const WorldPtr& world) {
  static const TempFolder folder;  // processes have one folder each; only the first rank's is used
  const auto path = std::filesystem::path(comm::broadcast_bytes(*world->group(), folder.path().string()));
  const auto begin = std::chrono::steady_clock::now();
  const auto error = error_of([&] { save_and_fail_alone(world, path); });
  const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_THAT(error, HasSubstr(world->rank() == 1 ? "the forward failed" : "rank 1"));
  EXPECT_LT(seconds, 60) << "the time-out is " << world->timeout().count() << " ms";
  EXPECT_FALSE(std::filesystem::exists(path / "LATEST"));
}

TEST(Snapshot, ARankThatFailsAloneEndsItsPeersLongBeforeTheTimeout) {
  run_ranks({.size = 3, .mode = RankMode::kProcesses, .limit_seconds = 150}, fail_alone);
}

// As a thread, the failed rank has unwound before its peers get the failure.
TEST(Snapshot, AThreadThatFailsAloneEndsItsPeersLongBeforeTheTimeout) {
  const TempFolder folder;
  const auto begin = std::chrono::steady_clock::now();
  const auto error = error_of(
      [&] { comm::run_thread_ranks(3, [&](const WorldPtr& world) { save_and_fail_alone(world, folder.path()); }); });
  const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_THAT(error, HasSubstr("the forward failed"));
  EXPECT_LT(seconds, 60);
  EXPECT_FALSE(std::filesystem::exists(folder / "LATEST"));
}

}  // namespace
}  // namespace tessera::testing
