// Shards a tensor over one rank and reads it back.
#include <ATen/ATen.h>
#include <tessera/dtensor.h>
#include <tessera/text.h>

#include <cstdio>

int main() {
  const auto world = tessera::comm::World::connect({});
  const auto mesh = tessera::init_device_mesh(world, "cpu", {world->size()});
  const auto values = at::arange(6, at::kFloat);
  const auto sharded = tessera::distribute_tensor(values, mesh, {tessera::Shard(0)});
  std::printf("sum %g\n", tessera::full_tensor(sharded.mul(2)).sum().item<double>());
  return 0;
}
