#include "tests/checkpoint/many_saves.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

TESSERA_RANKS_TEST(Saves, TwoThousandLeaveNothingInStoreOrMemory, (4)) { expect_flat(world, 2000, 6144); }

}  // namespace
}  // namespace tessera
