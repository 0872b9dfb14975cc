// Tests of optimizer updates in backward: on every sharded layout the bits are those of updates after backward.
// Settings that exclude such updates are refused.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/models/files/weights.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/run/run_layout.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/run/run_setup.h"
#include "tessera/train/step/step.h"
#include "tests/models/tiny.h"
#include "tests/parallel/small_model.h"
#include "tests/support/ranks.h"

namespace tessera::train {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

struct Kind {
  std::string name;
  RunLayout layout;
  bool sgd = false, defer = false;
  c10::ScalarType dtype = at::kFloat;
  std::string checkpointing = "none";
  int64_t micro_batches = 2;
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

struct Rig {
  RunMesh place;
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<TrainStep> step;
  int updates = 0;

  Rig(const std::shared_ptr<comm::World>& world, const Kind& kind, bool early)
      : place(kind.layout, testing::test_device_type(), world) {
    const auto config = ModelConfig::parse(testing::tiny_config(), "tiny");
    model = make_parallel_model(
        config, kind.dtype,
        {.mesh = place.mesh(), .activation_checkpointing = parse_activation_checkpointing(kind.checkpointing)});
    init_weights(*model, 5, testing::test_device());
    optimizer = kind.sgd ? optim::make_sgd(*model, {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1})
                         : optim::make_adamw(*model, {.lr = 0.01});
    step = std::make_unique<TrainStep>(*model, *optimizer, world->group(),
                                       StepOptions{.max_grad_norm = 0,
                                                   .early_step = early,
                                                   .defer_gradient_sync = kind.defer,
                                                   .is_counted = place.is_counted(),
                                                   .before_update = [this] { ++updates; }});
  }
  StepResult run(int64_t index, int64_t micro_batches) {
    std::vector<data::Batch> batches;
    for (int64_t i = 0; i < micro_batches; ++i) {
      const auto tokens =
          testing::tiny_tokens(2, 12).cpu().add(11 * index + 5 * i + 3 * place.data_rank()).remainder_(37);
      batches.push_back(place.local_tokens(data::make_batch(tokens, testing::next_labels(tokens),
                                                            at::arange(12).expand({2, 12}).contiguous(),
                                                            at::zeros({2, 12}, at::kLong))));
    }
    return step->run(batches, 0.01 / static_cast<double>(1 + index));
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
};

class EarlyUpdatesParity : public ::testing::TestWithParam<Kind> {};

TEST_P(EarlyUpdatesParity, EqualsUpdatesAfterBackwardBitwise) {
  const auto& kind = GetParam();
  const auto& layout = kind.layout;
  const auto ranks = static_cast<int>(layout.dp_replicate * layout.dp_shard * layout.tp * layout.cp);
  testing::run_ranks({.size = ranks}, [&](const std::shared_ptr<comm::World>& world) {
    Rig early(world, kind, true), usual(world, kind, false);
    for (int64_t index = 0; index < 3; ++index) {
      const auto result = early.run(index, kind.micro_batches), wanted = usual.run(index, kind.micro_batches);
      EXPECT_EQ(result.loss, wanted.loss) << index;
      EXPECT_NEAR(result.grad_norm / wanted.grad_norm, 1, 1e-12) << index;  // squares are added in another order
      EXPECT_EQ(early.updates, index + 1);
      for (const auto& parameter : early.model->parameters()) EXPECT_FALSE(parameter.grad().defined());
      const auto values = early.values(), others = usual.values();
      ASSERT_EQ(values.size(), others.size());
      for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(at::equal(values[i], others[i])) << index << " " << i;
    }
    EXPECT_EQ(early.optimizer->steps(), 3);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, EarlyUpdatesParity,
    ::testing::Values(Kind{"one", {}}, Kind{"fsdp", {.dp_shard = 2}},
                      Kind{.name = "fsdp_sgd", .layout = {.dp_shard = 2}, .sgd = true},
                      Kind{.name = "fsdp_deferred", .layout = {.dp_shard = 2}, .defer = true},
                      Kind{.name = "fsdp_one_micro_batch", .layout = {.dp_shard = 2}, .micro_batches = 1},
                      Kind{.name = "fsdp_bf16", .layout = {.dp_shard = 2}, .dtype = at::kBFloat16},
                      Kind{.name = "fsdp_recomputed", .layout = {.dp_shard = 2}, .checkpointing = "full"},
                      Kind{"hsdp", {.dp_replicate = 2, .dp_shard = 2}}, Kind{"tp", {.tp = 2}},
                      Kind{"tp_fsdp", {.dp_shard = 2, .tp = 2}}, Kind{"cp", {.cp = 2}}),
    [](const auto& info) { return info.param.name; });

TEST(EarlyUpdates, AreRefusedWithSettingsThatNeedAllGradients) {
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    Rig rig(world, {"fsdp", {.dp_shard = 2}}, false);
    const auto refused = [&](const StepOptions& options) {
      return error_of([&] { TrainStep(*rig.model, *rig.optimizer, world->group(), options); });
    };
    EXPECT_THAT(refused({.max_grad_norm = 1, .early_step = true}), HasSubstr("Set max_grad_norm to 0"));
    EXPECT_THAT(refused({.max_grad_norm = 0, .skip_nonfinite = true, .early_step = true}),
                HasSubstr("skip_nonfinite true"));
  });
}

TEST(EarlyUpdates, AreRefusedWithMuon) {
  TESSERA_CPU_ONLY("NCCL keeps what an error leaves under way, the pretend device does not");
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    Rig rig(world, {"fsdp", {.dp_shard = 2}}, false);
    rig.optimizer = optim::make_muon(*rig.model, {});
    rig.step = std::make_unique<TrainStep>(*rig.model, *rig.optimizer, world->group(),
                                           StepOptions{.max_grad_norm = 0, .early_step = true});
    EXPECT_THAT(error_of([&] { rig.run(0, 1); }), HasSubstr("Use AdamW or SGD"));
  });
}

// A gradient that arrives after its parameter's update would be lost, or used with a later optimizer state.
TEST(EarlyUpdates, SecondUpdateOfAParameterInAStepIsAnError) {
  testing::run_ranks({.size = 1}, [&](const std::shared_ptr<comm::World>& world) {
    Rig rig(world, {"one", {}}, false);
    const auto parameter = rig.model->parameters().front();
    const auto with_gradient = [&] {
      parameter.mutable_grad() = at::ones_like(parameter.detach());
      return std::vector<at::Tensor>{parameter};
    };
    rig.optimizer->step_early(with_gradient());
    EXPECT_THAT(error_of([&] { rig.optimizer->step_early(with_gradient()); }), HasSubstr("a further gradient"));
    EXPECT_THAT(error_of([&] { rig.optimizer->step(); }), HasSubstr("a further gradient"));
    rig.optimizer->zero_grad();
    rig.optimizer->step();
    rig.optimizer->step_early(with_gradient());
    EXPECT_EQ(rig.optimizer->steps(), 1);
  });
}

TEST(EarlyUpdates, IncompatibleRecipesAreRefused) {
  const auto error_with = [](std::vector<std::string> overrides) {
    overrides.emplace_back("optimizer.early_step_in_backward=true");
    return error_of([&] { parse_recipe("model: {path: m}\ndata: {train: [d]}\n", "r.yaml", overrides); });
  };
  EXPECT_THAT(error_with({}), HasSubstr("optimizer.max_grad_norm 1, wanted 0"));
  EXPECT_THAT(error_with({"optimizer.max_grad_norm=0", "optimizer.name=muon"}), HasSubstr("wanted adamw or sgd"));
  EXPECT_THAT(error_with({"optimizer.max_grad_norm=0", "train.on_nonfinite=skip"}), HasSubstr("wanted stop"));
  const std::vector<std::string> right = {"optimizer.max_grad_norm=0", "optimizer.early_step_in_backward=true"};
  const auto recipe = parse_recipe("model: {path: m}\ndata: {train: [d]}\n", "r.yaml", right);
  const auto config = ModelConfig::parse(testing::tiny_config(), "tiny");
  EXPECT_THAT(error_of([&] { check_layout(recipe, {.dp_replicate = 2}, config); }), HasSubstr("dp_replicate 2"));
  check_layout(recipe, {.dp_replicate = 2, .dp_shard = 2}, config);
}

}  // namespace
}  // namespace tessera::train
