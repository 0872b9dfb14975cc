// Random numbers on a GPU: the CPU's bits for uniform draws, within a few units in the last place for normal ones.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/device_backends.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random/random.h"

namespace tessera {
namespace {

TEST(RandomCuda, DrawsAreTheCpus) {
  if (comm::visible_devices(c10::DeviceType::CUDA) == 0) GTEST_SKIP() << "this process sees no GPU";
  const auto world = comm::World::single();
  const auto drawn = [&](const char* device, bool normal) {
    const auto mesh = init_device_mesh(world, device, {1});
    manual_seed(20, mesh);
    auto values = dtensor::zeros({1000, 37}, mesh);
    normal ? values.normal_() : values.uniform_(-1, 2);
    return full_tensor(values).cpu();
  };
  EXPECT_TRUE(at::equal(drawn("cuda", false), drawn("cpu", false)));
  EXPECT_TRUE(at::allclose(drawn("cuda", true), drawn("cpu", true), 1.2e-7, 0));
}

}  // namespace
}  // namespace tessera
