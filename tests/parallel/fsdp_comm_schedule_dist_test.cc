// Tests of when fully sharded groups are gathered, prefetched and gathered again: all ranks gather in the same order,
// and no forward uses old values.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"
#include "tests/parallel/checkpointed.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

// ---- prefetch ----

// Sets the number of cores per rank that this rank knows. Other ranks may know another number.
void set_known_cores(const WorldPtr& world, int least_per_rank) {
  const_cast<comm::WorldInfo&>(world->info()).hosts.least_cores_per_rank = least_per_rank;
}

TEST(Prefetch, IsTheSameOnRanksOfDifferentHosts) {
  TESSERA_CPU_ONLY("accelerators gather ahead whatever the cores");
  on_threads(2, [](const WorldPtr& world) {
    set_known_cores(world, world->rank() == 0 ? 1 : 0);
    SmallModel plain, model(3);
    shard(model, {.mesh = line(world)});
    set_gradient_divide_factor(model, 1);
    for (int step = 0; step < 2; ++step) {
      plain_backward(plain, step);
      rank_backward(model, *world, step);
    }
    EXPECT_EQ(fsdp_stats(model).peak_unsharded_groups, 2);  // the root and one group: there was no prefetch
    EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
  });
}

TEST(Prefetch, IsDecidedOverBothDimsOfAMesh) {
  TESSERA_CPU_ONLY("accelerators gather ahead whatever the cores");
  on_threads(4, [](const WorldPtr& world) {
    set_known_cores(world, world->rank() == 3 ? 0 : 1);
    SmallModel model;
    shard(model, {.mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"replicate", "shard"})});
    for (int step = 0; step < 2; ++step) rank_backward(model, *world, step);
    EXPECT_EQ(fsdp_stats(model).peak_unsharded_groups, 2);
  });
}

TEST(Prefetch, RefusesDifferentSettingsOnRanks) {
  on_threads(3, [](const WorldPtr& world) {
    SmallModel model;
    shard(model, {.mesh = line(world)});
    if (world->rank() != 1) set_prefetch(model, true);
    EXPECT_THAT(error_of([&] { rank_backward(model, *world, 0); }),
                HasSubstr("set_prefetch differs between ranks: on on rank 0, not called on rank 1"));
    set_prefetch(model, true);
    rank_backward(model, *world, 0);
  });
}

// Number of all-gathers in the second step, and the largest number of groups that were gathered at once in its
// backward.
std::pair<int64_t, int64_t> gathers_of_a_step(Checkpointed& model) {
  for (int step = 0;; ++step) {
    reset_fsdp_stats(model);
    const auto output = model(Values(static_cast<uint64_t>(step))({4, 6}).set_requires_grad(true));
    const int64_t forward = fsdp_stats(model).all_gathers;
    reset_fsdp_stats(model);
    output.sum().backward();
    if (step == 1) return {forward + fsdp_stats(model).all_gathers, fsdp_stats(model).peak_unsharded_groups};
  }
}

TEST(Prefetch, FollowsTheOrderOfRecomputedLayers) {
  on_threads(2, [](const WorldPtr& world) {
    for (const auto& recompute : std::vector<std::vector<bool>>{{true, false, false}, {true, true, true}}) {
      Checkpointed plain({false, false, false}), model(recompute);
      for (auto& layer : model.layers) fully_shard(*layer, {.mesh = line(world)});
      fully_shard(model, {.mesh = line(world)});
      set_prefetch(model, true);
      const auto [gathers, peak] = gathers_of_a_step(model);
      EXPECT_EQ(gathers, 3 + 3);  // each layer once in forward and once in backward; no gather without use
      EXPECT_EQ(peak, 2);         // the next group was prefetched
      for (int step = 0; step < 2; ++step) {
        plain(Values(static_cast<uint64_t>(step))({4, 6}).set_requires_grad(true)).sum().backward();
      }
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
    }
  });
}

// ---- updated values ----

at::Tensor evaluate(SmallModel& model) {
  at::NoGradGuard no_grad;
  return model(tokens_of(50));
}

TEST(FullyShard, ForwardBetweenStepsUsesUpdatedParameters) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool adam : {true, false}) {
      for (const bool keep : {true, false}) {
        SmallModel plain(3, at::kDouble), sharded(3, at::kDouble);
        shard(sharded, {.mesh = line(world), .reshard_after_forward = keep ? std::optional(false) : std::nullopt});
        set_gradient_divide_factor(sharded, 1);
        const auto optimizer_of = [&](SmallModel& model) {
          return adam ? optim::make_adamw(model, {.lr = 0.05}) : optim::make_sgd(model, {.lr = 0.5});
        };
        const auto plain_optimizer = optimizer_of(plain), optimizer = optimizer_of(sharded);
        for (int step = 0; step < 3; ++step) {
          plain_backward(plain, step);
          rank_backward(sharded, *world, step);
          EXPECT_LT(distance({evaluate(sharded)}, {evaluate(plain)}), 1e-10) << "before step " << step;
          EXPECT_EQ(fsdp_stats(sharded).unsharded_groups, keep ? 4 : 0);
          plain_optimizer->step();
          optimizer->step();
          EXPECT_LT(distance({evaluate(sharded)}, {evaluate(plain)}), 1e-10) << "after step " << step;
          plain.zero_grad();
          sharded.zero_grad();
        }
      }
    }
  });
}

// The root stays gathered after a forward without a backward.
TEST(FullyShard, UsesUpdatedParametersAfterAForwardWithoutBackward) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain(3, at::kDouble), model(3, at::kDouble);
    shard(model, {.mesh = line(world)});
    set_gradient_divide_factor(model, 1);
    const auto plain_optimizer = optim::make_adamw(plain, {.lr = 0.05});
    const auto optimizer = optim::make_adamw(model, {.lr = 0.05});
    plain_backward(plain, 0);
    rank_backward(model, *world, 0);
    model(tokens_of(1));
    EXPECT_EQ(fsdp_stats(model).unsharded_groups, 1);
    plain_optimizer->step();
    optimizer->step();
    EXPECT_LT(distance({evaluate(model)}, {evaluate(plain)}), 1e-10);
  });
}

TEST(FullyShard, AllGathersAgainWhenShardsChangedWhileUnsharded) {
  const std::vector<std::pair<std::string, std::function<void(SmallModel&, const WorldPtr&)>>> changes = {
      {"local parts",
       [](SmallModel& model, const WorldPtr&) {
         for (auto& parameter : model.parameters()) to_local(parameter).mul_(0.5);
       }},
      {"DTensors",
       [](SmallModel& model, const WorldPtr&) {
         for (auto& parameter : model.parameters()) parameter.mul_(0.5);
       }},
      // The shards of the other ranks did not change, but these ranks take part in the all-gather.
      {"one rank",
       [](SmallModel& model, const WorldPtr& world) {
         if (world->rank() == 1) to_local(model.layers[1]->parameters()[1]).mul_(0.5);
       }},
      {"an optimizer",
       [](SmallModel& model, const WorldPtr&) {
         const auto optimizer = optim::make_adamw(model, {.lr = 0.1});
         for (auto& parameter : model.parameters()) parameter.mutable_grad() = at::ones_like(parameter);
         optimizer->step();
       }},
      {"other parameters", [](SmallModel& model, const WorldPtr&) {
         auto& slot = model.layers[0]->own_parameters()[1];
         const auto value = at::ones_like(slot.parameter.detach());
         nn::Module::set_parameter(slot, value.set_requires_grad(true));
       }}};
  for (const auto& [name, change] : changes) {
    on_threads(3, [&, change = change, name = name](const WorldPtr& world) {
      SmallModel model;
      shard(model, {.mesh = line(world), .reshard_after_forward = false});
      at::NoGradGuard no_grad;
      const auto before = evaluate(model);
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 4);
      EXPECT_TRUE(evaluate(model).equal(before));
      EXPECT_EQ(fsdp_stats(model).all_gathers, 4);  // no further all-gather
      change(model, world);
      const auto after = evaluate(model);
      SmallModel plain;
      const auto values = whole_parameters(model);
      for (size_t i = 0; i < values.size(); ++i) plain.parameters()[i].copy_(values[i]);
      EXPECT_FALSE(after.equal(before)) << name;
      EXPECT_LT(distance({after}, {evaluate(plain)}), kTolerance) << name;
    });
  }
}

}  // namespace
}  // namespace tessera::testing
