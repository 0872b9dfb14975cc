// Tests of set_is_last_backward and set_reshard_after_backward: the switches decide which work waits between
// micro-batches, and no gradient is lost. The gradients are compared with those of a model without switches and of one
// process.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMicroBatches = 3;

// Gradients of three micro-batches. `prepare(model, micro_batch)` sets the switches before each micro-batch.
template <class Prepare>
std::vector<at::Tensor> accumulated(SmallModel& model, const comm::World& world, const Prepare& prepare) {
  for (int64_t step = 0; step < kMicroBatches; ++step) {
    prepare(model, step);
    rank_backward(model, world, step);
  }
  auto gradients = whole_gradients(model);
  model.zero_grad();
  return gradients;
}

TEST(BackwardSwitches, PendingReductionsFinishWithTheLastBackward) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool replicas : {false, true}) {
      const auto mesh =
          replicas ? init_device_mesh(world, test_device_type(), {2, 1}, {"replicate", "shard"}) : line(world);
      SmallModel usual, relaxed;
      shard(usual, {.mesh = mesh});
      shard(relaxed, {.mesh = mesh});
      const auto wanted = accumulated(usual, *world, [](SmallModel&, int64_t) {});
      for (int round = 0; round < 2; ++round) {
        const auto gradients = accumulated(relaxed, *world, [](SmallModel& model, int64_t step) {
          set_is_last_backward(model, step + 1 == kMicroBatches);
        });
        EXPECT_TRUE(same_bits(gradients, wanted)) << round;
      }
      EXPECT_EQ(fsdp_stats(relaxed).unsharded_groups, 0);
    }
  });
}

TEST(BackwardSwitches, SwitchOnAChildAppliesToTheWholeFsdpTree) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    shard(model, {.mesh = line(world)});
    set_is_last_backward(*model.layers[1], false);  // the root does not exist yet
    rank_backward(model, *world, 0);
    const auto early = model.embedding.grad().defined();
    set_is_last_backward(*model.layers[1], true);
    rank_backward(model, *world, 1);
    EXPECT_FALSE(early);  // gradient of the root, whose reduction starts last
    SmallModel usual;
    shard(usual, {.mesh = line(world)});
    for (int64_t step = 0; step < 2; ++step) rank_backward(usual, *world, step);
    EXPECT_TRUE(same_bits(whole_gradients(model), whole_gradients(usual)));
  });
}

TEST(BackwardSwitches, UnshardedParametersAreNotAllGatheredAgain) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel usual, kept;
    shard(usual, {.mesh = line(world)});
    shard(kept, {.mesh = line(world), .reshard_after_forward = false});
    const auto optimizer = optim::make_sgd(kept, {.lr = 0.1}), plain = optim::make_sgd(usual, {.lr = 0.1});
    for (int64_t step = 0; step < 2; ++step) {
      int64_t gathers = 0;
      for (int64_t micro = 0; micro < kMicroBatches; ++micro) {
        set_reshard_after_backward(kept, micro + 1 == kMicroBatches);
        rank_backward(kept, *world, 10 * step + micro);
        rank_backward(usual, *world, 10 * step + micro);
        const auto stats = fsdp_stats(kept);
        EXPECT_EQ(stats.unsharded_groups, micro + 1 == kMicroBatches ? 0 : 4);
        if (micro == 0) gathers = stats.all_gathers;
        EXPECT_EQ(stats.all_gathers, gathers) << micro;
      }
      EXPECT_TRUE(same_bits(whole_gradients(kept), whole_gradients(usual)));
      optimizer->step();
      plain->step();
      optimizer->zero_grad();
      plain->zero_grad();
    }
    // The parameters also stay gathered during the optimizer's step. The next forward must use the new values.
    for (int64_t step = 5; step < 7; ++step) {
      set_reshard_after_backward(kept, false);
      rank_backward(kept, *world, step);
      rank_backward(usual, *world, step);
      EXPECT_TRUE(same_bits(whole_gradients(kept), whole_gradients(usual)));
      optimizer->step();
      plain->step();
      optimizer->zero_grad();
      plain->zero_grad();
    }
  });
}

TEST(BackwardSwitches, UnshardedGradientsAreReducedInTheLastBackwardOnly) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    shard(model, {.mesh = line(world), .reshard_after_forward = false});
    set_gradient_divide_factor(model, 1);
    reset_fsdp_stats(model);
    const auto gradients = accumulated(model, *world, [](SmallModel& each, int64_t step) {
      const bool last = step + 1 == kMicroBatches;
      set_is_last_backward(each, last);
      set_reshard_after_backward(each, last);
      set_requires_gradient_sync(each, last);
    });
    EXPECT_EQ(fsdp_stats(model).reduce_scatters, 4);
    EXPECT_EQ(fsdp_stats(model).all_gathers, 4);
    SmallModel plain;
    for (int64_t step = 0; step < kMicroBatches; ++step) plain_backward(plain, step);
    EXPECT_LT(distance(gradients, whole_gradients(plain)), 10 * kTolerance);
  });
}

TEST(BackwardSwitches, ModelWorksAfterAFailedForwardBetweenMicroBatches) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model, usual;
    shard(model, {.mesh = line(world)});
    shard(usual, {.mesh = line(world)});
    set_is_last_backward(model, false);
    set_reshard_after_backward(model, false);
    rank_backward(model, *world, 0);
    EXPECT_THROW(model(here(at::full({1, 5}, 1000, at::kLong))), std::exception);
    set_is_last_backward(model, true);
    set_reshard_after_backward(model, true);
    model.zero_grad();
    rank_backward(model, *world, 1);  // the state of the failed forward is dropped
    model.zero_grad();
    rank_backward(model, *world, 2);
    rank_backward(usual, *world, 2);
    EXPECT_TRUE(same_bits(whole_gradients(model), whole_gradients(usual)));
    EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
  });
}

TEST(BackwardSwitches, ModuleWithoutFullyShardIsAnError) {
  SmallModel model;
  EXPECT_THAT(error_of([&] { set_is_last_backward(model, false); }), HasSubstr("Call fully_shard first"));
  EXPECT_THAT(error_of([&] { set_reshard_after_backward(model, false); }), HasSubstr("Call fully_shard first"));
}

}  // namespace
}  // namespace tessera::testing
