// The table of collectives over shared memory and over Gloo: every collective x dtype x operation with few elements,
// and one dtype with many. collective_table_slow_test.cc runs the whole table.
#include "tests/comm/collective_table.h"

namespace tessera::comm {
namespace {

TESSERA_RANKS_TEST(CollectiveTable, EqualsAPlainComputation, (1, 2, 3, 4)) {
  table::check_table(world, "shm", {.sizes = {0, 5}, .large_types = {at::kFloat}});
  table::check_table(world, "gloo", {.sizes = {0, 5}});
}
TESSERA_RANKS_TEST(CollectiveTable, EqualsAPlainComputationOnEightRanks, (8)) {
  table::check_table(world, "shm", {.sizes = {5}});
  table::check_table(world, "gloo", {.sizes = {0}, .large_types = {at::kFloat}});
}

}  // namespace
}  // namespace tessera::comm
