// Tests of the flags and switches between micro-batches, and of sharded models that are offloaded between steps.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/train/nemo/accumulation.h"
#include "tessera/train/nemo/module_offloading.h"
#include "tests/parallel/small_model.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace tessera::testing;

TEST(Accumulation, ReducesOnceAStepAndGivesTheGradientOfAllMicroBatches) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model, plain;
    shard(model, {.mesh = line(world), .reshard_after_forward = false});
    set_gradient_divide_factor(model, 1);
    MicrobatchFlags flags;
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      plain.zero_grad();
      prepare_for_grad_accumulation(flags, {&model});
      EXPECT_TRUE(flags.first_microbatch().value());
      reset_fsdp_stats(model);
      for (int64_t micro = 0; micro < 3; ++micro) {
        if (micro == 2) prepare_for_final_backward(flags, {&model});
        EXPECT_EQ(flags.optim_step(), micro == 2);
        rank_backward(model, *world, 10 * step + micro);
        plain_backward(plain, 10 * step + micro);
        EXPECT_EQ(fsdp_stats(model).unsharded_groups, micro == 2 ? 0 : 4);
        if (micro == 0) prepare_after_first_microbatch(flags);
        EXPECT_FALSE(flags.first_microbatch().value());
      }
      EXPECT_EQ(fsdp_stats(model).reduce_scatters, 4);
      EXPECT_EQ(fsdp_stats(model).all_gathers, 4);
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), 10 * kTolerance);
    }
  });
}

// Ranks are threads of one process here, so the flags must be separate for each thread.
TEST(Accumulation, FlagsAreSeparateForEachRank) {
  on_threads(2, [](const WorldPtr& world) {
    MicrobatchFlags flags;
    EXPECT_FALSE(flags.optim_step() || flags.first_microbatch().has_value());
    std::vector<std::pair<bool, bool>> heard;
    flags.on_change([&](const MicrobatchFlags& now) { heard.emplace_back(now.optim_step(), *now.first_microbatch()); });
    prepare_for_grad_accumulation(flags, {});
    comm::barrier(*world->group());
    if (world->rank() == 0) {
      prepare_after_first_microbatch(flags);
      prepare_for_final_backward(flags, {});
    }
    comm::barrier(*world->group());
    EXPECT_EQ(flags.optim_step(), world->rank() == 0);
    EXPECT_EQ(*flags.first_microbatch(), world->rank() == 1);
    if (world->rank() == 0) {
      EXPECT_THAT(heard, ElementsAre(std::pair(false, true), std::pair(false, false), std::pair(true, false)));
    }
  });
}

struct OwnHooks : nn::Callable<OwnHooks>, AccumulationHooks {
  std::vector<std::string> calls;
  void prepare_for_grad_accumulation(bool pp_enabled) override { calls.push_back(pp_enabled ? "A" : "a"); }
  void prepare_for_final_backward(bool pp_enabled) override { calls.push_back(pp_enabled ? "F" : "f"); }
};

TEST(Accumulation, CallsModelPartHooksUnlessPipelineIsEnabled) {
  OwnHooks own;
  SmallModel neither;
  MicrobatchFlags flags;
  const std::vector<nn::Module*> parts{&neither, &own};
  prepare_for_grad_accumulation(flags, parts);
  prepare_for_final_backward(flags, parts);
  EXPECT_THAT(own.calls, ElementsAre("a", "f"));
  prepare_for_grad_accumulation(flags, parts, /*pp_enabled=*/true);
  EXPECT_FALSE(flags.optim_step());
  prepare_for_final_backward(flags, parts, /*pp_enabled=*/true);
  EXPECT_TRUE(flags.optim_step());
  EXPECT_EQ(own.calls.size(), 2U);
}

TEST(Accumulation, ShardedModelTrainsIdenticallyAfterOffloadToAFile) {
  TESSERA_CPU_ONLY("is about a model on the CPU");
  TempFolder folder;
  on_threads(2, [&](const WorldPtr& world) {
    SmallModel model, usual;
    shard(model, {.mesh = line(world), .reshard_after_forward = false});
    shard(usual, {.mesh = line(world), .reshard_after_forward = false});
    for (int64_t step = 0; step < 3; ++step) {
      const OffloadLocations places{.device = c10::Device(c10::kCPU), .idle_folder = folder.path()};
      {
        ScopedModuleOffloading here(model, true, places);
        set_reshard_after_backward(model, false);
        rank_backward(model, *world, step);
      }
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
      rank_backward(usual, *world, step);
      EXPECT_TRUE(same_bits(whole_gradients(model), whole_gradients(usual))) << step;
      for (auto* each : {&model, &usual}) {
        const at::NoGradGuard no_grad;
        for (const auto& parameter : each->parameters()) to_local(parameter).sub_(to_local(parameter.grad()), 0.1);
      }
      EXPECT_TRUE(same_bits(whole_parameters(model), whole_parameters(usual))) << step;
    }
    EXPECT_THAT(tessera::testing::error_of([&] { move_to_device(model, c10::Device(c10::kCUDA)); }),
                HasSubstr("Create the mesh on this device"));
  });
}

}  // namespace
}  // namespace tessera::train
