#include "tests/checkpoint/many_saves.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::RankMode;

void save_often(RankMode mode) {
  testing::run_ranks({.size = 4, .mode = mode, .limit_seconds = 2800},
                     [](const auto& world) { expect_flat(world, 2000, 6144); });
}

TEST(Saves, TwoThousandLeaveNothingInStoreOrMemoryOfThreads) { save_often(RankMode::kThreads); }
TEST(Saves, TwoThousandLeaveNothingInStoreOrMemoryOfProcesses) { save_often(RankMode::kProcesses); }

}  // namespace
}  // namespace tessera
