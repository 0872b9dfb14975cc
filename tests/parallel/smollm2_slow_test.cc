// The real model, whose 9 heads and 3 key-value heads three ranks share.
#include <ATen/ATen.h>

#include "tests/parallel/parallel_families.h"
#include "tests/support/process.h"

namespace tessera::testing {
namespace {

StepOutcome outcome_of_smollm2(const std::shared_ptr<CausalLM>& model) {
  const auto text = at::arange(2 * 98, at::kLong).mul_(7919).remainder_(49152).view({2, 98});
  const auto loss = model->loss_sum({.tokens = text.narrow(1, 0, 97).contiguous()}, text.narrow(1, 1, 97).contiguous());
  (loss / (2 * 97)).backward();
  StepOutcome out;
  out.loss = loss.item<double>();
  out.norm = optim::get_grad_norm(model->parameters());
  for (const auto& named : model->named_parameters()) out.gradients[named.name] = named.slot->parameter.grad();
  return out;
}

// 97 tokens, which three ranks share unevenly. Two numbers in float32 may differ by twice their rounding, which for
// layer 10's gate is 1e-4 by itself (9e-5 on one rank, 2e-5 on three, 5e-5 in transformers): each is held against the
// step in float64, where layouts show what they change. Takes 8 GiB: two models with gradients, and one gradient whole
// at a time.
TEST(SmolLM2, ThreeRanksShareItsHeads) {
  const auto folder = asset("smollm2");
  const auto wanted = outcome_of_smollm2(from_pretrained(folder, at::kDouble));
  expect_same_step(outcome_of_smollm2(from_pretrained(folder, at::kFloat)), wanted, "one rank");
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    for (const bool sequences : {false, true}) {
      for (const auto checkpointing : {ActivationCheckpointing::kNone, ActivationCheckpointing::kFull}) {
        run_ranks({.size = 3, .limit_seconds = 600}, [&](const WorldPtr& world) {
          const auto model = make_model(ModelConfig::from_folder(folder), {.dtype = dtype, .device = at::kMeta});
          parallelize_model(*model, {.mesh = init_device_mesh(world, "cpu", {3}, {"tp"}),
                                     .sequence_parallel = sequences,
                                     .activation_checkpointing = checkpointing});
          to_empty(*model, at::kCPU);
          load_pretrained(*model, folder);
          expect_same_step(outcome_of_smollm2(model), wanted, sequences ? "with sequences" : "without sequences",
                           dtype == at::kDouble ? kDoubleStep : kFloatStep);
        });
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
