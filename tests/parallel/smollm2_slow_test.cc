// The real model, whose 9 heads and 3 key-value heads three ranks share.
#include <ATen/ATen.h>

#include "tests/parallel/parallel_families.h"
#include "tests/support/process.h"

namespace tessera::testing {
namespace {

struct RealLoss {
  double loss, norm;
};

RealLoss loss_of_smollm2(const std::shared_ptr<CausalLM>& model) {
  const auto text = at::arange(2 * 97, at::kLong).mul_(7919).remainder_(49152).view({2, 97});
  const auto loss = model->loss_sum({.tokens = text.narrow(1, 0, 96).contiguous()}, text.narrow(1, 1, 96).contiguous());
  (loss / (2 * 96)).backward();
  return {loss.item<double>(), optim::get_grad_norm(model->parameters())};
}

TEST(SmolLM2, ThreeRanksShareItsHeads) {
  const auto folder = asset("smollm2");
  const auto wanted = loss_of_smollm2(from_pretrained(folder, at::kFloat));
  for (const bool sequences : {false, true}) {
    on_threads(3, [&](const WorldPtr& world) {
      const auto model = make_model(ModelConfig::from_folder(folder), {.device = at::kMeta});
      parallelize_model(*model, {.mesh = init_device_mesh(world, "cpu", {3}, {"tp"}),
                                 .sequence_parallel = sequences,
                                 .activation_checkpointing = ActivationCheckpointing::kFull});
      to_empty(*model, at::kCPU);
      load_pretrained(*model, folder);
      const auto found = loss_of_smollm2(model);
      EXPECT_NEAR(found.loss, wanted.loss, 1e-5 * wanted.loss);
      EXPECT_NEAR(found.norm, wanted.norm, 1e-5 * wanted.norm);
    });
  }
}

}  // namespace
}  // namespace tessera::testing
