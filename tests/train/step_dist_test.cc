// Tests of a training step whose loss is not finite: the step is skipped, or is an error, and changes nothing.
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/models/files/weights.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/train/step/step.h"
#include "tests/models/tiny.h"
#include "tests/support/ranks.h"

namespace tessera::train {
namespace {

data::Batch batch_of(int64_t first) {
  const auto tokens = testing::tiny_tokens(2, 12).cpu().add(first).remainder_(37);
  return data::make_batch(tokens, testing::next_labels(tokens), at::arange(12).expand({2, 12}).contiguous(),
                          at::zeros({2, 12}, at::kLong));
}

struct StepRig {
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<TrainStep> step;

  StepRig(const std::shared_ptr<comm::World>& world, bool skip) {
    model = make_model(ModelConfig::parse(testing::tiny_config(), "tiny"), {.device = c10::Device(at::kMeta)});
    std::vector<nn::Module*> blocks;
    for (const auto& block : model->blocks()) blocks.push_back(block.get());
    data_parallel(*model, blocks,
                  {.mesh = init_device_mesh(world, testing::test_device_type(), {world->size()}, {"dp_shard"})});
    init_weights(*model, 5, testing::test_device());
    optimizer = optim::make_adamw(*model, {.lr = 0.01});
    step = std::make_unique<TrainStep>(*model, *optimizer, world->group(testing::test_device().type()),
                                       StepOptions{.skip_nonfinite = skip});
  }
  StepResult run(int64_t first, const std::shared_ptr<comm::World>& world) {
    return step->run({batch_of(first + world->rank()), batch_of(first + 7 * world->rank())}, 0.01);
  }
  std::vector<at::Tensor> values() const {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> all;
    for (const auto& parameter : model->parameters()) all.push_back(full_tensor(parameter).clone());
    for (const auto& name : optimizer->parameter_names()) {
      for (const auto& [state, tensor] : optimizer->state(name)) {
        all.push_back((is_dtensor(tensor) ? full_tensor(tensor) : tensor).clone());
      }
    }
    return all;
  }
  // Adds `value` to one element of the last parameter, on the rank that holds this element.
  void add_to_weight(double value) {
    const at::NoGradGuard no_grad;
    auto local = to_local(model->parameters().back());
    if (local.numel() > 0 && device_mesh(model->parameters().back())->rank() == 0) local.view(-1)[0].add_(value);
  }
};

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

TEST(TrainStep, NonFiniteStepIsSkippedOrAnErrorAndChangesNothing) {
  for (const int ranks : {1, 2}) {
    for (const bool skip : {true, false}) {
      // On an accelerator the update is done before the host reads that the loss is not finite.
      if (!skip && testing::on_accelerator()) continue;
      testing::run_ranks({.size = ranks}, [&](const std::shared_ptr<comm::World>& world) {
        StepRig disturbed(world, skip), plain(world, skip);
        for (StepRig* rig : {&disturbed, &plain}) EXPECT_FALSE(rig->run(0, world).skipped);
        const auto before = disturbed.values();
        constexpr double kHuge = 1e38;  // finite, but its squares overflow
        disturbed.add_to_weight(kHuge);
        if (skip) {
          const auto result = disturbed.run(3, world);
          EXPECT_TRUE(result.skipped);
          EXPECT_FALSE(std::isfinite(result.loss) && std::isfinite(result.grad_norm));
        } else {
          try {
            disturbed.run(3, world);
            ADD_FAILURE() << "a step that is not finite was taken";
          } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kInternal);
            EXPECT_NE(std::string(error.what()).find("not finite"), std::string::npos) << error.what();
          }
        }
        for (const auto& parameter : disturbed.model->parameters()) EXPECT_FALSE(parameter.grad().defined());
        {
          const at::NoGradGuard no_grad;  // restores the value; a subtraction would round
          const auto values = disturbed.values();
          size_t changed = 0;
          for (size_t i = 0; i < values.size(); ++i) changed += !at::equal(values[i], before[i]);
          EXPECT_EQ(changed, 1u) << "the weight that this test changed, and nothing else";
          auto last = disturbed.model->parameters().back();
          const auto index = disturbed.model->parameters().size() - 1;
          auto local = to_local(last);
          const auto first_rows = before[index].view(-1).narrow(0, 0, 1);
          if (device_mesh(last)->rank() == 0) local.view(-1).narrow(0, 0, 1).copy_(first_rows);
        }
        expect_equal(disturbed.values(), before);
        for (StepRig* rig : {&disturbed, &plain}) EXPECT_FALSE(rig->run(9, world).skipped);
        expect_equal(disturbed.values(), plain.values());
      });
    }
  }
}

}  // namespace
}  // namespace tessera::train
