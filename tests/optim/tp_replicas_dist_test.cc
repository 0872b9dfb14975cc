// Tests the gradients of parameters that are replicated over the ranks of tensor parallelism, as in NeMo.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/nn/gradient_marks.h"
#include "tessera/optim/nemo/tp_replicas.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

using nn::ReplicaReduction;
using ::testing::HasSubstr;

// A model of one parameter. The test sets its gradient.
struct Norm : nn::Callable<Norm>, nn::GradientMarks {
  at::Tensor weight;
  explicit Norm(const at::Tensor& value) { register_parameter("weight", weight, value); }
  void set(const at::Tensor& gradient) { weight.mutable_grad() = gradient; }
};
struct Norms : nn::Callable<Norms>, nn::GradientMarks {
  std::vector<std::shared_ptr<Norm>> norms;
  Norm& add(const at::Tensor& value) {
    norms.push_back(register_module(std::to_string(norms.size()), std::make_shared<Norm>(value)));
    return *norms.back();
  }
};

at::Tensor parameter(at::ScalarType dtype = at::kFloat) { return here(at::zeros({3}, dtype)).set_requires_grad(true); }
double first(const Norm& norm) {
  const auto& gradient = norm.weight.grad();
  return (is_dtensor(gradient) ? to_local(gradient) : gradient).flatten()[0].item<double>();
}

TEST(TpReplicas, AreAveragedOrReducedAsTheirModuleIsMarked) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"dp", "tp"});
    const double own = 1.0 + static_cast<double>(mesh->local_rank(1)) + 10.0 * static_cast<double>(mesh->local_rank(0));
    const double sum = 3.0 + 20.0 * static_cast<double>(mesh->local_rank(0));
    for (const int64_t bucket_bytes : {int64_t{1}, int64_t{24}, int64_t{1} << 20}) {
      Norms model;
      auto& mean = model.add(parameter());
      auto& summed = model.add(parameter());
      auto& skipped = model.add(parameter());
      auto& listed = model.add(parameter(at::kBFloat16));
      auto& expert = model.add(parameter());
      auto& frozen = model.add(here(at::zeros({3})));
      auto& owned = model.add(parameter());
      auto& unused = model.add(parameter());
      auto& twice = model.add(parameter(at::kDouble));
      summed.tp_replicas = ReplicaReduction::kSum;
      skipped.tp_replicas = ReplicaReduction::kSkip;
      expert.ep_local_experts = true;
      owned.grad_divisors = {{"weight", 2.0}};
      frozen.set_requires_grad(false);
      for (const auto& norm : model.norms) {
        if (norm.get() != &unused) norm->set(at::full({3}, own, norm->weight.options().requires_grad(false)));
      }
      optim::synchronize_tp_replica_gradients({&model}, mesh, {.sum = {&listed}, .bucket_bytes = bucket_bytes});
      EXPECT_EQ(first(mean), sum / 2);
      EXPECT_EQ(first(summed), sum);
      EXPECT_EQ(first(listed), sum);
      EXPECT_EQ(first(twice), sum / 2);
      for (auto* kept : {&skipped, &expert, &frozen, &owned}) EXPECT_EQ(first(*kept), own);
      EXPECT_FALSE(unused.weight.grad().defined());
      optim::synchronize_tp_replica_gradients({&model}, mesh, {.sum = {&listed}});
      EXPECT_EQ(first(mean), sum / 2);
      EXPECT_EQ(first(summed), 2 * sum);  // a gradient is summed once a step
    }
    Norms nested;
    nested.tp_replicas = ReplicaReduction::kSum;
    auto& inner = nested.add(parameter());
    auto& outer = nested.add(parameter());
    inner.tp_replicas = ReplicaReduction::kMean;
    for (auto* norm : {&inner, &outer}) norm->set(here(at::full({3}, own, at::kFloat)));
    optim::synchronize_tp_replica_gradients({&nested}, mesh);
    EXPECT_EQ(first(inner), sum / 2);
    EXPECT_EQ(first(outer), sum);
  });
}

TEST(TpReplicas, Float16GradientsAreReducedInFloat32) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2}, {"tp"});
    Norms model;
    auto& half = model.add(parameter(at::kHalf));
    // The sum of the two gradients overflows float16.
    half.set(here(at::full({3}, world->rank() == 0 ? 60000.0 : 50000.0, at::kHalf)));
    optim::synchronize_tp_replica_gradients({&model}, mesh);
    EXPECT_EQ(half.weight.grad().scalar_type(), at::kHalf);
    EXPECT_NEAR(first(half), 55000, 32);
  });
}

TEST(TpReplicas, OnlyDTensorsReplicatedOverTensorParallelAreReduced) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"dp", "tp"});
    const auto all = init_device_mesh(world, test_device_type(), {4}, {"ep"});
    const auto tp = static_cast<double>(mesh->local_rank(1));
    const auto made = [&](const MeshPtr& where, const Placements& placements) {
      return from_local(here(at::zeros({2, 2})), where, placements).detach().set_requires_grad(true);
    };
    Norms model;
    auto& both = model.add(made(mesh, {Shard(0), Replicate()}));
    auto& cut = model.add(made(mesh, {Replicate(), Shard(0)}));
    auto& over_dp = model.add(made(mesh->slice({"dp"}), {Shard(0)}));
    auto& over_all = model.add(made(all, {Shard(0)}));
    auto& over_tp = model.add(made(mesh->slice({"tp"}), {Replicate()}));
    auto& pending = model.add(made(mesh, {Replicate(), Replicate()}));
    for (const auto& norm : model.norms) {
      norm->set(from_local(here(at::full({2, 2}, 1 + tp)), device_mesh(norm->weight), placements(norm->weight)));
    }
    pending.set(from_local(here(at::full({2, 2}, 1 + tp)), mesh, {Replicate(), Partial()}));
    optim::synchronize_tp_replica_gradients({&model}, mesh);
    for (auto* replica : {&both, &over_dp, &over_tp}) EXPECT_EQ(first(*replica), 1.5);
    for (auto* kept : {&cut, &over_all, &pending}) EXPECT_EQ(first(*kept), 1 + tp);
  });
}

TEST(TpReplicas, DifferentReplicasAreAnErrorOnAllRanksAndUnchanged) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2}, {"tp"});
    Norms model;
    auto& fine = model.add(parameter());
    auto& lacking = model.add(parameter());
    fine.set(here(at::full({3}, 1.0 + world->rank(), at::kFloat)));
    if (world->rank() == 0) lacking.set(here(at::ones({3})));
    const auto synchronize = [&] { optim::synchronize_tp_replica_gradients({&model}, mesh); };
    EXPECT_THAT(error_of(synchronize), HasSubstr("rank 0 has '1.weight: mean, Float [3] plain', rank 1 has '1.weight: "
                                                 "mean, no gradient'"));
    EXPECT_EQ(first(fine), 1.0 + world->rank());
    if (!on_accelerator()) {  // some accelerators have no sparse tensors
      lacking.set(at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), at::ones({1}), {3}));
      EXPECT_THAT(error_of(synchronize), HasSubstr("1.weight: found a sparse gradient"));
    }
    Norms shared;
    auto& one = shared.add(parameter());
    auto& other = shared.add(one.weight);
    other.tp_replicas = ReplicaReduction::kSum;
    EXPECT_THAT(error_of([&] { optim::synchronize_tp_replica_gradients({&shared}, mesh); }),
                HasSubstr("0.weight and 1.weight are the same parameter"));
    // With one rank and no mesh the call has no effect.
    optim::synchronize_tp_replica_gradients({&shared}, nullptr);
    optim::synchronize_tp_replica_gradients({&model}, init_device_mesh(world, test_device_type(), {2}, {"dp"}));
  });
}

}  // namespace
}  // namespace tessera::testing
