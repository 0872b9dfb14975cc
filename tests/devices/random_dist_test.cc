// Tests that random numbers on the pretend device equal the CPU's for the same seed and the same element of the global
// tensor.
#include "tests/devices/pretend.h"
#include "tests/dtensor/random_draws.h"
#include "tests/support/ranks.h"

namespace tessera::testing {
namespace {

using WorldPtr = std::shared_ptr<comm::World>;

TEST(PretendRandom, UniformDrawsEqualTheCpuBitwise) {
  for (const auto& [name, draw] : uniform_draws()) {
    run_ranks({.size = 2}, [&](const WorldPtr& world) {
      const at::Tensor wanted = drawn(world, "cpu", Replicate(), draw);
      for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate()), Placement(Shard(1))}) {
        EXPECT_TRUE(at::equal(drawn(world, "pretend", placement, draw), wanted)) << name;
      }
    });
  }
}

TEST(PretendRandom, OtherDrawsAreWithinOneUnitInTheLastPlace) {
  for (const auto& [name, draw] : other_draws()) {
    run_ranks({.size = 2}, [&](const WorldPtr& world) {
      const at::Tensor wanted = drawn(world, "cpu", Replicate(), draw);
      for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
        EXPECT_LE(most_units_apart(drawn(world, "pretend", placement, draw), wanted), 1) << name;
      }
    });
  }
}

}  // namespace
}  // namespace tessera::testing
