// The whole table of collectives against a plain computation: every collective x dtype x operation x size x 1, 2, 3, 4
// and 8 ranks, as threads and as processes, over shared memory and over Gloo.
#include "tests/comm/collective_table.h"

namespace tessera::comm {
namespace {

constexpr double kLimitSeconds = 1200;

class CollectiveTableSlow : public testing::RanksTest {
 protected:
  void check(const char* backend) const {
    testing::RankCase which = GetParam();
    which.limit_seconds = kLimitSeconds;
    testing::run_ranks(which, [&](const std::shared_ptr<World>& world) {
      table::check_table(world, backend,
                         {.large_types = {std::begin(table::kReal), std::end(table::kReal)},
                          .large_operations = {std::begin(table::kOperations), std::end(table::kOperations)}});
    });
  }
};

TEST_P(CollectiveTableSlow, EqualsAPlainComputationOverSharedMemory) { check("shm"); }
TEST_P(CollectiveTableSlow, EqualsAPlainComputationOverGloo) { check("gloo"); }

INSTANTIATE_TEST_SUITE_P(, CollectiveTableSlow, ::testing::ValuesIn(testing::rank_cases(1, 2, 3, 4, 8)),
                         testing::rank_case_name);

class CollectiveTableInPlaceSlow : public CollectiveTableSlow {
  const table::InSharedBuffers shared_;
};
TEST_P(CollectiveTableInPlaceSlow, EqualsAPlainComputation) { check("shm"); }
INSTANTIATE_TEST_SUITE_P(, CollectiveTableInPlaceSlow, ::testing::ValuesIn(table::process_cases({2, 3, 4, 8})),
                         testing::rank_case_name);

}  // namespace
}  // namespace tessera::comm
