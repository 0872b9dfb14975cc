// Tests the scaling of gradients of pipelines and experts as in NeMo AutoModel.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/nn/gradient_marks.h"
#include "tessera/optim/expert_parameters.h"
#include "tessera/optim/nemo/gradient_scaling.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

using optim::scale_grads_and_clip_grad_norm;
using ::testing::HasSubstr;

static_assert(std::is_constructible_v<optim::ReplicationFactor, int>);
static_assert(!std::is_constructible_v<optim::ReplicationFactor, bool>);
static_assert(!std::is_constructible_v<optim::ReplicationFactor, double>);

TEST(ExpertParameters, AreFoundByTheirName) {
  using optim::is_te_expert_parameter;
  for (const auto* name : {"model.layers.0.mlp.experts.gate_up_linear.weight0", "mlp.experts.down_linear.bias12",
                           "a.mlp.experts.down_linear.weight3.foo", "mlp.experts.x.mlp.experts.down_linear.weight3"}) {
    EXPECT_TRUE(is_te_expert_parameter(name)) << name;
  }
  for (const auto* name : {"model.layers.0.mlp.experts.gate_up_linear.weight", "mlp.experts.gate_up_linear.weight_1",
                           "model.layers.0.moe.experts.down_linear.weight0", "xmlp.experts.down_linear.weight0",
                           "mlp.shared_experts.down_linear.weight0", "mlp.experts.up_linear.weight0",
                           "mlp.experts.down_linear.scale0", ""}) {
    EXPECT_FALSE(is_te_expert_parameter(name)) << name;
  }
}

at::Tensor leaf(const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  auto parameter = at::zeros_like(gradient).set_requires_grad(true);
  parameter.mutable_grad() = gradient;
  return parameter;
}

// A model with experts and a gate that is replicated on all ranks.
struct Experts : nn::Callable<Experts>, nn::GradientMarks {
  at::Tensor weight;
  explicit Experts(const at::Tensor& gradient) { register_parameter("weight", weight, leaf(gradient)); }
};
struct MoeWith : nn::Callable<MoeWith>, nn::GradientMarks {
  at::Tensor gate;
  std::shared_ptr<Experts> experts;
  MoeWith(const at::Tensor& gate_gradient, const at::Tensor& expert_gradient) {
    register_parameter("gate", gate, leaf(gate_gradient));
    experts = register_module("experts", std::make_shared<Experts>(expert_gradient));
  }
};

double value_of(const at::Tensor& parameter) { return to_local(parameter.grad()).flatten()[0].item<double>(); }
double plain_value_of(const at::Tensor& parameter) { return parameter.grad().flatten()[0].item<double>(); }

TEST(GradientScaling, DividesExpertGradientsByTheDataParallelToExpertShardRatio) {
  on_threads(4, [](const WorldPtr& world) {
    const auto moe = init_device_mesh(world, test_device_type(), {2, 2}, {"ep_shard", "ep"});
    const auto made = [&](double gate, double expert) {
      return std::make_unique<MoeWith>(
          here(at::full({2}, gate)),
          distribute_tensor(here(at::full({4, 3}, expert)), moe->slice({"ep"}), {Shard(0)}, std::nullopt));
    };
    auto model = made(2, 2);
    EXPECT_EQ(scale_grads_and_clip_grad_norm(std::nullopt, {model.get()},
                                             {.moe_mesh = moe, .ep_axis_name = "ep", .dp_group_size = 4}),
              0);
    EXPECT_EQ(value_of(model->experts->weight), 1);
    EXPECT_EQ(plain_value_of(model->gate), 2);
    model = made(8, 8);
    scale_grads_and_clip_grad_norm(
        std::nullopt, {model.get()},
        {.moe_mesh = moe, .ep_axis_name = "ep", .dp_group_size = 4, .expert_tp_replication_factor = 2});
    EXPECT_EQ(value_of(model->experts->weight), 2);
    EXPECT_EQ(plain_value_of(model->gate), 8);
    model = made(8, 8);
    scale_grads_and_clip_grad_norm(
        std::nullopt, {model.get()},
        {.pp_enabled = true, .moe_mesh = moe, .ep_axis_name = "ep", .num_label_tokens = 8, .dp_group_size = 4});
    EXPECT_EQ(value_of(model->experts->weight), 2);
    EXPECT_EQ(plain_value_of(model->gate), 4);
    // No mesh axis is given, so nothing marks these parameters as experts.
    model = made(8, 8);
    scale_grads_and_clip_grad_norm(std::nullopt, {model.get()}, {.moe_mesh = moe, .dp_group_size = 4});
    EXPECT_EQ(value_of(model->experts->weight), 8);
  });
}

TEST(GradientScaling, SelectsExpertsByMarksAndNamesAndScalesFrozenGradients) {
  on_threads(2, [](const WorldPtr& world) {
    const auto moe = init_device_mesh(world, test_device_type(), {2}, {"ep"});
    const optim::ScaleAndClipOptions options{.moe_mesh = moe, .ep_axis_name = "ep", .dp_group_size = 2};
    MoeWith marked(here(at::full({2}, 8.0)), here(at::full({2}, 8.0)));
    marked.experts->ep_local_experts = true;
    scale_grads_and_clip_grad_norm(std::nullopt, {&marked}, options);
    EXPECT_EQ(plain_value_of(marked.experts->weight), 4);
    EXPECT_EQ(plain_value_of(marked.gate), 8);
    MoeWith owned(here(at::full({2}, 8.0)), here(at::full({2}, 8.0)));
    owned.experts->ep_local_experts = true;
    owned.experts->grad_divisors = {{"weight", 8.0}};
    owned.gate.set_requires_grad(false);
    scale_grads_and_clip_grad_norm(std::nullopt, {&owned},
                                   {.pp_enabled = true, .moe_mesh = moe, .num_label_tokens = 4, .dp_group_size = 2});
    EXPECT_EQ(plain_value_of(owned.experts->weight), 0.5);
    EXPECT_EQ(plain_value_of(owned.gate), 4);  // frozen parameters keep their gradient
    struct Named : nn::Callable<Named> {
      at::Tensor weight;
      Named() { register_parameter("mlp.experts.down_linear.weight0", weight, leaf(here(at::full({2}, 8.0)))); }
    } named;
    scale_grads_and_clip_grad_norm(std::nullopt, {&named, &named},
                                   options);  // a model part that is passed twice is scaled once
    EXPECT_EQ(plain_value_of(named.weight), 4);
  });
}

TEST(GradientScaling, SkipsScalingWithoutLabelTokensAndRefusesBadFactorsFirst) {
  MoeWith model(here(at::full({2}, 8.0)), here(at::full({2}, 8.0)));
  for (const auto tokens : {std::optional<int64_t>(0), std::optional<int64_t>()}) {
    scale_grads_and_clip_grad_norm(std::nullopt, {&model},
                                   {.pp_enabled = true, .num_label_tokens = tokens, .dp_group_size = 4});
  }
  scale_grads_and_clip_grad_norm(std::nullopt, {&model}, {.num_label_tokens = 2, .dp_group_size = 4});  // no pipeline
  const optim::ScaleAndClipOptions pipeline{.pp_enabled = true, .num_label_tokens = 8, .dp_group_size = 4};
  for (const int factor : {0, -1}) {
    auto options = pipeline;
    options.expert_tp_replication_factor = factor;
    EXPECT_THAT(error_of([&] { scale_grads_and_clip_grad_norm(std::nullopt, {&model}, options); }),
                HasSubstr("expert_tp_replication_factor: found " + std::to_string(factor)));
  }
  EXPECT_THAT(error_of([&] { scale_grads_and_clip_grad_norm(1.0, {&model}, pipeline); }),
              HasSubstr("pp_axis_name must be provided when pp_enabled is true"));
  EXPECT_EQ(plain_value_of(model.gate), 8);
  // The gradients are scaled by 8 / 4 and then clipped.
  EXPECT_NEAR(scale_grads_and_clip_grad_norm(
                  1.0, {&model}, {.pp_enabled = true, .pp_axis_name = "pp", .num_label_tokens = 8, .dp_group_size = 4}),
              8, 1e-12);
  EXPECT_NEAR(plain_value_of(model.gate), 0.5, 1e-6);
}

TEST(GradientScaling, NormSumsExpertsOfAllRanks) {
  on_threads(4, [](const WorldPtr& world) {
    const auto moe = init_device_mesh(world, test_device_type(), {2, 2}, {"ep_shard", "ep"});
    const int64_t ep = moe->local_rank(1);
    const double infinity = std::numeric_limits<double>::infinity();
    // On mesh dim ep, rank 0 has experts with gradients of 3, rank 1 of 40.
    const auto made = [&] {
      auto model = std::make_unique<MoeWith>(here(at::full({1}, 4.0)), here(at::full({1}, ep == 0 ? 3.0 : 40.0)));
      model->experts->ep_local_experts = true;
      return model;
    };
    auto model = made();
    const optim::ModelClipOptions options{.moe_mesh = moe, .ep_axis_name = "ep"};
    const double norm = std::sqrt(16.0 + 9.0 + 1600.0);
    EXPECT_NEAR(optim::clip_grad_norm(1.0, {model.get()}, options), norm, 1e-12);
    EXPECT_NEAR(plain_value_of(model->gate), 4 / norm, 1e-6);
    EXPECT_NEAR(plain_value_of(model->experts->weight), (ep == 0 ? 3 : 40) / norm, 1e-5);
    model = made();
    auto largest = options;
    largest.norm_type = infinity;
    EXPECT_EQ(optim::clip_grad_norm(1e9, {model.get()}, largest), 40);
    // The gradients are also sharded over ep_shard.
    MoeWith sharded(here(at::full({1}, 4.0)), distribute_tensor(here(at::full({2}, ep == 0 ? 3.0 : 40.0)),
                                                                moe->slice({"ep_shard"}), {Shard(0)}, std::nullopt));
    sharded.experts->ep_local_experts = true;
    EXPECT_NEAR(optim::clip_grad_norm(1e9, {&sharded}, options), std::sqrt(16.0 + 2 * 9.0 + 2 * 1600.0), 1e-12);
    // A DTensor over ep is not counted twice, with or without the mark of experts.
    MoeWith placed(here(at::full({1}, 4.0)),
                   distribute_tensor(here(at::full({2}, 3.0)), moe->slice({"ep"}), {Shard(0)}, std::nullopt));
    placed.experts->ep_local_experts = true;
    EXPECT_NEAR(optim::clip_grad_norm(1e9, {&placed}, options), std::sqrt(16.0 + 2 * 9.0), 1e-12);
    // The experts of one rank got no token.
    model = made();
    if (ep == 1) model->experts->weight.mutable_grad().reset();
    EXPECT_NEAR(optim::clip_grad_norm(1e9, {model.get()}, options), 5, 1e-12);
    EXPECT_THAT(
        error_of([&] { optim::clip_grad_norm({model->gate}, 1.0, {.ep_mesh = moe, .ep_parameters = {model->gate}}); }),
        HasSubstr("wanted one dim"));
  });
}

TEST(GradientScaling, TheReplicationFactorIsTheTensorParallelSizeOfMarkedModels) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {1, 2}, {"dp", "tp"});
    MoeWith plain(here(at::ones({1})), here(at::ones({1}))), marked(here(at::ones({1})), here(at::ones({1})));
    marked.experts->moe_tp_replica_sync = true;
    EXPECT_EQ(optim::get_expert_tp_replication_factor({&plain}, mesh), 1);
    EXPECT_EQ(optim::get_expert_tp_replication_factor({&plain, &marked}, mesh), 2);
    EXPECT_EQ(optim::get_expert_tp_replication_factor({&marked}, mesh->slice({"dp"})), 1);
    EXPECT_EQ(optim::get_expert_tp_replication_factor({&marked}, nullptr), 1);
  });
}

}  // namespace
}  // namespace tessera::testing
