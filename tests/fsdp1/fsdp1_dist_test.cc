// Tests wrap_fsdp1 against training on one rank, for every strategy, and tests that it holds no more memory than it
// needs.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tests/fsdp1/fsdp1_model.h"
#include "tests/parallel/checkpointed.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr ShardingStrategy kStrategies[] = {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
                                            ShardingStrategy::kNoShard};

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(nn::Module&)>;
// Weight decay is off, because a flat parameter decays as a whole and plain vectors do not decay.
std::unique_ptr<optim::Optimizer> adam(nn::Module& module) {
  return optim::make_adamw(module, {.lr = 1e-2, .weight_decay = 0});
}
std::unique_ptr<optim::Optimizer> decaying_adam(nn::Module& module) {
  return optim::make_adamw(module, {.lr = 1e-2, .weight_decay = 0.3});
}
std::unique_ptr<optim::Optimizer> momentum(nn::Module& module) {
  return optim::make_sgd(module, {.lr = 0.1, .momentum = 0.9, .nesterov = true});
}

// Compares gradients and parameters after every step. The model is float64, because Adam magnifies the rounding of
// gradients that are close to zero.
void expect_trains_as_plain(const WorldPtr& world, const Fsdp1Options& options, bool nested,
                            const MakeOptimizer& make) {
  SmallModel plain(3, at::kDouble), model(3, at::kDouble);
  if (nested) {
    wrap(model, options);
  } else {
    wrap_fsdp1(model, options);
  }
  const auto plain_optimizer = make(plain), optimizer = make(model);
  for (int step = 0; step < 3; ++step) {
    plain_backward(plain, step);
    mean_backward(model, *world, step);
    ASSERT_LT(distance(whole_grads(model), plain_grads(plain)), 1e-10) << "gradients of step " << step;
    plain_optimizer->step();
    optimizer->step();
    ASSERT_LT(distance(whole_values(model), plain_values(plain)), 1e-10) << "after step " << step;
    plain_optimizer->zero_grad();
    optimizer->zero_grad();
  }
}

TEST(Fsdp1, MatchesSingleRankTraining) {
  for (const int size : {1, 2, 3, 4}) {
    on_threads(size, [](const WorldPtr& world) {
      for (const auto strategy : kStrategies) {
        for (const bool use_orig_params : {false, true}) {
          SCOPED_TRACE(::testing::Message() << static_cast<int>(strategy) << use_orig_params);
          const Fsdp1Options options = {group_of(world), strategy, use_orig_params};
          expect_trains_as_plain(world, options, true, use_orig_params ? decaying_adam : adam);
          if (strategy != ShardingStrategy::kFullShard) continue;
          expect_trains_as_plain(world, options, true, momentum);
          expect_trains_as_plain(world, options, false, adam);
        }
      }
    });
  }
}

TESSERA_RANKS_TEST(Fsdp1, MatchesSingleRankTrainingOnThreadsAndProcesses, (2)) {
  expect_trains_as_plain(world, {.group = group_of(world)}, true, adam);
  expect_trains_as_plain(world, {.group = group_of(world), .use_orig_params = true}, true, adam);
}

TEST(Fsdp1, TrainsOverASubgroupOfRanks) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"a", "b"});
    SmallModel plain, model;
    wrap(model, {.group = mesh->group("b"), .use_orig_params = true});
    const auto rank = static_cast<int>(mesh->local_rank(1));
    backward(model, rows_of_rank(tokens_of(0), rank, 2), 6);
    plain_backward(plain, 0);
    EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
  });
}

TEST(Fsdp1, TrainingIsDeterministic) {
  on_threads(3, [](const WorldPtr& world) {
    const auto trained = [&](bool use_orig_params) {
      SmallModel model;
      wrap(model, {.group = group_of(world), .use_orig_params = use_orig_params});
      const auto optimizer = adam(model);
      for (int step = 0; step < 3; ++step) {
        mean_backward(model, *world, step);
        optimizer->step();
        optimizer->zero_grad();
      }
      return whole_values(model);
    };
    for (const bool use_orig_params : {false, true}) {
      const auto first = trained(use_orig_params), again = trained(use_orig_params);
      for (const auto& [name, value] : first) EXPECT_TRUE(value.equal(again.at(name))) << name;
    }
  });
}

TEST(Fsdp1, CollectivesAndMemoryFollowTheShardingStrategy) {
  on_threads(2, [](const WorldPtr& world) {
    struct Expected {
      int64_t gathers, reductions, peak;
    };
    const int64_t ahead = on_accelerator() ? 1 : 0;  // a freed buffer is kept until the next gather
    const Expected expected[] = {{6 + 6 + 1, 7, 2 + ahead}, {6 + 1, 7, 7}, {0, 7, 7}};  // of six layers and the root
    for (const auto strategy : kStrategies) {
      const auto& want = expected[static_cast<size_t>(strategy)];
      SmallModel model(6);
      wrap(model, {.group = group_of(world), .sharding_strategy = strategy});
      for (int step = 0; step < 2; ++step) {
        mean_backward(model, *world, step);
        const auto stats = fsdp_stats(model);
        EXPECT_EQ(stats.all_gathers, want.gathers);
        EXPECT_EQ(stats.reduce_scatters, want.reductions);
        EXPECT_EQ(stats.peak_unsharded_groups, want.peak);
        EXPECT_EQ(stats.unsharded_groups, 0);
        EXPECT_EQ(stats.unsharded_bytes, 0);
        EXPECT_EQ(stats.accumulated_bytes, 0);
        reset_fsdp_stats(model);
      }
      {
        const at::NoGradGuard no_grad;
        model(tokens_of(0));
      }
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
      for (const auto& handle : flat_parameter_handles(model)) {
        const int64_t numel = handle->layout().unpadded_numel();
        EXPECT_EQ(handle->shard().numel(), strategy == ShardingStrategy::kNoShard ? numel : (numel + 1) / 2);
        EXPECT_EQ(static_cast<int64_t>(handle->shard().storage().nbytes()), handle->shard().numel() * 4);
      }
    }
  });
}

// Every choice of the micro-batches that synchronise must give the gradient of all micro-batches.
TEST(Fsdp1, AccumulatesGradientsWithAndWithoutNoSync) {
  on_threads(3, [](const WorldPtr& world) {
    for (const auto strategy : kStrategies) {
      for (const bool use_orig_params : {false, true}) {
        for (int mask = 0; mask < 4; ++mask) {
          SmallModel plain, model;
          wrap(model, {group_of(world), strategy, use_orig_params});
          for (int i = 0; i < 3; ++i) {
            plain_backward(plain, i);
            if (i == 2 || (mask >> i & 1) != 0) {
              mean_backward(model, *world, i);
              continue;
            }
            NoSync accumulate(model);
            const auto before = fsdp_stats(model).reduce_scatters;
            mean_backward(model, *world, i);
            EXPECT_EQ(fsdp_stats(model).reduce_scatters, before);
            EXPECT_GT(fsdp_stats(model).accumulated_bytes, 0);
          }
          EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance) << "mask " << mask;
        }
      }
    }
  });
}

struct ReusedLayer : nn::Callable<ReusedLayer> {
  std::shared_ptr<Layer> layer;
  ReusedLayer() {
    Values values(5);
    layer = register_module("layer", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return (*layer)((*layer)(x)) * (*layer)(x * 2); }
};

TEST(Fsdp1, AllowsAUnitToRunSeveralTimesInOneForward) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      ReusedLayer plain, model;
      wrap_fsdp1(*model.layer, {.group = group_of(world), .use_orig_params = use_orig_params});
      wrap_fsdp1(model, {.group = group_of(world), .use_orig_params = use_orig_params});
      const auto input = Values(9)({4, 6});
      for (int step = 0; step < 2; ++step) {
        plain(input).sum().backward();
        model(input).sum().backward();
      }
      EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
    }
  });
}

TEST(Fsdp1, AllGathersAgainForRecomputedLayers) {
  on_threads(2, [](const WorldPtr& world) {
    for (const auto& recompute : std::vector<std::vector<bool>>{{true, false, true}, {true, true, true}}) {
      Checkpointed plain({false, false, false}), model(recompute);
      for (auto& layer : model.layers) wrap_fsdp1(*layer, {.group = group_of(world), .use_orig_params = true});
      wrap_fsdp1(model, {.group = group_of(world)});
      for (int step = 0; step < 2; ++step) {
        const auto input = Values(static_cast<uint64_t>(step))({4, 6});
        plain(input.clone().set_requires_grad(true)).sum().backward();
        model(input.clone().set_requires_grad(true)).sum().backward();
      }
      EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
    }
  });
}

// A checkpoint (recompute) around a layer that is a unit of its own.
struct CheckpointAround : nn::Callable<CheckpointAround> {
  at::Tensor scale;
  std::shared_ptr<Layer> layer;
  explicit CheckpointAround(Values& values) {
    register_parameter("scale", scale, values({6}) + 1);
    layer = register_module("layer", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return (*layer)(x * scale); }
};
struct CheckpointsAround : nn::Callable<CheckpointsAround> {
  std::vector<std::shared_ptr<CheckpointAround>> blocks;
  CheckpointsAround() {
    Values values(5, at::kDouble);
    for (const char* name : {"a", "b"}) {
      blocks.push_back(register_module(name, std::make_shared<CheckpointAround>(values)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = (*block)(x);
    return x;
  }
};

TEST(Fsdp1, GivesGradientsToUnitsInsideOfActivationCheckpoints) {
  on_threads(2, [](const WorldPtr& world) {
    for (const auto strategy : kStrategies) {
      for (const bool use_orig_params : {false, true}) {
        SCOPED_TRACE(::testing::Message() << static_cast<int>(strategy) << use_orig_params);
        const Fsdp1Options options{group_of(world), strategy, use_orig_params};
        CheckpointsAround plain, model;
        for (auto& block : model.blocks) {
          wrap_fsdp1(*block->layer, options);
          checkpoint_activations(*block);
        }
        wrap_fsdp1(model, options);
        for (uint64_t step = 0; step < 2; ++step) {
          const auto input = Values(step, at::kDouble)({4, 6});
          plain(input).sum().backward();
          model(input).sum().backward();
        }
        EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), 1e-10);
        EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
      }
    }
  });
}

// Transposed weights and a channels-last weight. The flat parameter has them in storage order; forward sees their
// strides.
struct Strided : nn::Callable<Strided> {
  at::Tensor first, second, kernel;
  Strided() {
    Values values(5);
    register_parameter("first", first, values({7, 6}).t());
    register_parameter("second", second, values({6, 7}));
    register_parameter("kernel", kernel, values({5, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) {
    strides = {first.strides().vec(), second.strides().vec(), kernel.strides().vec()};
    return at::gelu(x.matmul(first)).matmul(second.t()).sum(0) * kernel.select(0, 2).flatten().narrow(0, 0, 6) +
           kernel.sum() * first.t().contiguous().select(0, 1);
  }
  std::vector<std::vector<int64_t>> strides;
};

TEST(Fsdp1, KeepsStorageOrder) {
  on_threads(3, [](const WorldPtr& world) {
    for (const auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      for (const bool use_orig_params : {false, true}) {
        Strided plain, model;
        wrap_fsdp1(model, {group_of(world), strategy, use_orig_params});
        const auto plain_optimizer = momentum(plain), optimizer = momentum(model);
        for (uint64_t step = 0; step < 2; ++step) {
          const auto input = Values(step)({4, 6});
          plain(input).sum().backward();
          model(input).sum().backward();
          EXPECT_EQ(model.strides, plain.strides);
          EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
          plain_optimizer->step();
          optimizer->step();
          plain_optimizer->zero_grad();
          optimizer->zero_grad();
        }
        EXPECT_LT(distance(whole_values(model), plain_values(plain)), kTolerance);
      }
    }
  });
}

TEST(Fsdp1, DoesNotTrainFrozenParameters) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain(3, at::kDouble), model(3, at::kDouble);
    for (auto* each : {&plain, &model}) {
      each->layers[1]->set_requires_grad(false);
      each->layers[0]->parameters()[1].set_requires_grad(false);
    }
    wrap(model, {.group = group_of(world), .use_orig_params = true});
    const auto plain_optimizer = momentum(plain), optimizer = momentum(model);
    for (int step = 0; step < 2; ++step) {
      plain_backward(plain, step);
      mean_backward(model, *world, step);
      for (const auto& parameter : model.layers[1]->parameters()) EXPECT_FALSE(parameter.grad().defined());
      EXPECT_FALSE(model.layers[0]->parameters()[1].grad().defined());
      EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), 1e-10);
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
      plain_optimizer->step();
      optimizer->step();
      plain_optimizer->zero_grad();
      optimizer->zero_grad();
    }
    EXPECT_LT(distance(whole_values(model), plain_values(plain)), 1e-10);
    // A frozen member may require gradients later.
    for (auto* each : {&plain, &model}) each->layers[0]->parameters()[1].set_requires_grad(true);
    plain_backward(plain, 2);
    mean_backward(model, *world, 2);
    EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), 1e-10);
  });
}

// A model that uses `second` on rank 0 only, or on no rank.
struct SometimesUnused : nn::Callable<SometimesUnused> {
  at::Tensor first, second;
  SometimesUnused() {
    Values values(5);
    register_parameter("first", first, values({5}));
    register_parameter("second", second, values({6}));
  }
  at::Tensor forward(const at::Tensor& x, bool use_second) {
    return use_second ? x * first.sum() + second.sum() : x * first.sum();
  }
};

TEST(Fsdp1, DistinguishesUnusedParametersFromParametersUsedOnSomeRanks) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      SometimesUnused model;
      wrap_fsdp1(model, {.group = group_of(world), .use_orig_params = use_orig_params});
      model(here(at::ones({3})), false).sum().backward();
      const auto infos = flat_parameter_handles(model)[0]->shard_param_infos();
      EXPECT_EQ(model.parameters().back().grad().defined(), !use_orig_params);
      model(here(at::ones({3})), world->rank() == 0).sum().backward();
      EXPECT_EQ(model.parameters().back().grad().defined(), !use_orig_params || infos[1].in_shard);
      const auto grads = whole_grads(model);
      EXPECT_TRUE(grads.at("second").allclose(here(at::full({6}, 1.5))));  // 3 on one of two ranks
      EXPECT_TRUE(grads.at("first").allclose(here(at::full({5}, 6.0))));
    }
  });
}

struct Scale : nn::Callable<Scale> {
  at::Tensor weight;
  explicit Scale(at::TensorOptions options) { register_parameter("weight", weight, here(at::ones({5}, options))); }
  at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
};

TEST(Fsdp1, AveragesFloat16GradientsWithoutOverflow) {
  on_threads(4, [](const WorldPtr& world) {
    for (const auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      for (const bool use_orig_params : {false, true}) {
        Scale model(at::kHalf);
        wrap_fsdp1(model, {group_of(world), strategy, use_orig_params});
        model(here(at::full({5}, 30000, at::kHalf))).backward(here(at::ones({}, at::kHalf)));
        EXPECT_TRUE(whole_grads(model).at("weight").equal(here(at::full({5}, 30000, at::kHalf))));
      }
    }
  });
}

TEST(Fsdp1, FreesTheOriginalParameters) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      SmallModel model;
      const c10::weak_intrusive_ptr<c10::StorageImpl> table(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(model.embedding.storage().unsafeGetStorageImpl()));
      EXPECT_FALSE(table.expired());
      wrap(model, {.group = group_of(world), .use_orig_params = use_orig_params});
      EXPECT_TRUE(table.expired());
    }
  });
}

TEST(Fsdp1, SeesWritesToShardsThatStayedUnsharded) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      SmallModel plain, model;
      wrap(model, {group_of(world), ShardingStrategy::kShardGradOp, use_orig_params});
      model(tokens_of(0));  // a forward that no backward follows
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 4);
      {
        const at::NoGradGuard no_grad;
        // The shard is changed on one rank: through the handle, and through the parameters.
        for (const auto& handle : flat_parameter_handles(model)) handle->shard().mul_(2);
        for (const auto& parameter : model.parameters()) parameter.mul_(1.5);
        for (const auto& parameter : plain.parameters()) parameter.mul_(3);
      }
      EXPECT_LT(distance(std::vector{model(tokens_of(1))}, std::vector{plain(tokens_of(1))}), kTolerance);
    }
  });
}

TEST(Fsdp1, ContinuesAfterAnExceptionInForward) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain, model;
    wrap(model, {.group = group_of(world)});
    bool fail = true;
    model.layers[1]->register_forward_hook([&](nn::Module&, nn::TensorRefs&) {
      if (std::exchange(fail, false)) raise(ErrorKind::kConfig, "on purpose");
    });
    EXPECT_THAT(error_of([&] { mean_backward(model, *world, 0); }), HasSubstr("on purpose"));
    mean_backward(model, *world, 0);
    plain_backward(plain, 0);
    EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
  });
}

}  // namespace
}  // namespace tessera::testing
