// Random numbers on the pretend device are the CPU's, by seed and place in the global tensor.
#include <ATen/ATen.h>

#include <cstring>

#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random/random.h"
#include "tests/devices/pretend.h"
#include "tests/support/ranks.h"

namespace tessera::testing {
namespace {

using WorldPtr = std::shared_ptr<comm::World>;
using Draw = std::function<void(at::Tensor&)>;

// The most numbers of the type that lie between two of one place.
int64_t most_units_apart(const at::Tensor& a, const at::Tensor& b) {
  const auto place = [](const at::Tensor& values) {  // of numbers in their order, from below
    const auto bits = values.view(at::kInt).to(at::kLong);
    return at::where(bits.lt(0), bits.bitwise_and(0x7fffffff).neg(), bits);
  };
  return (place(a) - place(b)).abs().max().item<int64_t>();
}

at::Tensor drawn(const WorldPtr& world, const std::string& device, const Placement& placement, const Draw& draw) {
  const auto mesh = init_device_mesh(world, device, {world->size()}, {"dp"});
  manual_seed(20, mesh);
  auto values = dtensor::zeros({37, 11}, mesh, {placement});
  draw(values);
  draw(values);  // operations are counted
  return full_tensor(values).cpu();
}

TEST(PretendRandom, UniformDrawsAreTheCpusBits) {
  const std::vector<std::pair<const char*, Draw>> draws = {
      {"uniform_", [](at::Tensor& x) { x.uniform_(-1, 2); }},
      {"bernoulli_", [](at::Tensor& x) { x.bernoulli_(0.3); }},
      {"random_", [](at::Tensor& x) { x.random_(-5, 1000003); }},
      {"dropout", [](at::Tensor& x) { x = at::dropout(x + 1, 0.3, true); }},
      {"rand_like", [](at::Tensor& x) { x = at::rand_like(x); }}};
  for (const auto& [name, draw] : draws) {
    run_ranks({.size = 2}, [&](const WorldPtr& world) {
      const at::Tensor wanted = drawn(world, "cpu", Replicate(), draw);
      for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate()), Placement(Shard(1))}) {
        EXPECT_TRUE(at::equal(drawn(world, "pretend", placement, draw), wanted)) << name;
      }
    });
  }
}

TEST(PretendRandom, OtherDrawsAreWithinOneUnitInTheLastPlace) {
  const std::vector<std::pair<const char*, Draw>> draws = {
      {"normal_", [](at::Tensor& x) { x.normal_(1, 3); }},
      {"log_normal_", [](at::Tensor& x) { x.log_normal_(0.5, 2); }},
      {"exponential_", [](at::Tensor& x) { x.exponential_(2); }},
      {"cauchy_", [](at::Tensor& x) { x.cauchy_(1, 2); }},
      {"geometric_", [](at::Tensor& x) { x.geometric_(0.01); }},
      {"randn_like", [](at::Tensor& x) { x = at::randn_like(x); }}};
  for (const auto& [name, draw] : draws) {
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
