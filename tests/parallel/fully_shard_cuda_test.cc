// Tests of sharded training on GPUs: the values are those of the CPU, while all-gathers, reductions and copies run on
// separate streams.
#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/backends/nccl_backend.h"
#include "tessera/optim/optimizer.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

std::vector<at::Tensor> trained(const WorldPtr& world, const std::string& device, FullyShardOptions options) {
  options.mesh = init_device_mesh(world, device, {world->size()}, {"dp"});
  SmallModel model;
  shard(model, options);
  const auto optimizer = optim::make_adamw(model, {.lr = 1e-2});
  for (int step = 0; step < 4; ++step) {
    const auto rows = rows_of_rank(tokens_of(step), world->rank(), world->size()).to(options.mesh->device());
    (loss_sum(model(rows), rows) / 48.0).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  std::vector<at::Tensor> out;
  for (const auto& each : whole_parameters(model)) out.push_back(each.cpu());
  return out;
}

TEST(FullyShardCuda, StepsEqualTheCpus) {
  const int gpus = comm::visible_devices(c10::DeviceType::CUDA);
  if (gpus == 0) {
    GTEST_SKIP() << "this process sees no GPU";
  }
  for (const int ranks : {1, 2}) {
    if (ranks > gpus) continue;
    on_threads(ranks, [](const WorldPtr& world) {
      for (const bool offload : {false, true}) {
        const auto wanted = trained(world, "cpu", {}), found = trained(world, "cuda", {.cpu_offload = offload});
        EXPECT_LT(distance(found, wanted), 1e-4) << "offload " << offload;
      }
      const MixedPrecisionPolicy half = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      EXPECT_LT(distance(trained(world, "cuda", {.mp_policy = half}), trained(world, "cpu", {.mp_policy = half})),
                3e-2);
    });
  }
}

}  // namespace
}  // namespace tessera::testing
