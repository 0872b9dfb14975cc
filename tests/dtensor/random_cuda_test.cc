// Tests random numbers on a GPU against the CPU's: equal bits for uniform draws, within a unit in the last place for
// other draws.
#include <gtest/gtest.h>

#include "tessera/comm/backends/device_backends.h"
#include "tests/dtensor/random_draws.h"

namespace tessera::testing {
namespace {

TEST(RandomCuda, DrawsEqualTheCpu) {
  if (comm::visible_devices(c10::DeviceType::CUDA) == 0) {
    GTEST_SKIP() << "this process sees no GPU";
  }
  const auto world = comm::World::single();
  for (const auto& [name, draw] : uniform_draws()) {
    EXPECT_TRUE(at::equal(drawn(world, "cuda", Replicate(), draw), drawn(world, "cpu", Replicate(), draw))) << name;
  }
  for (const auto& [name, draw] : other_draws()) {
    EXPECT_LE(most_units_apart(drawn(world, "cuda", Replicate(), draw), drawn(world, "cpu", Replicate(), draw)), 1)
        << name;
  }
}

}  // namespace
}  // namespace tessera::testing
