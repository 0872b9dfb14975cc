// Tests of fully_shard: shard sizes, the number and order of collectives, memory, gradients and errors.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

TEST(FullyShard, KeepsShardsOfTorchChunkSizes) {
  on_threads(4, [](const WorldPtr& world) {
    SmallModel model;
    shard(model, {.mesh = line(world)});
    // 11 rows over 4 ranks: 3, 3, 3, 2; 6 rows: 2, 2, 2, 0.
    EXPECT_EQ(to_local(model.embedding).size(0), world->rank() < 3 ? 3 : 2);
    EXPECT_EQ(to_local(model.norm).size(0), world->rank() < 3 ? 2 : 0);
    EXPECT_EQ(model.norm.sizes(), at::IntArrayRef({6}));
    EXPECT_TRUE(same_bits(whole_parameters(model), whole_parameters(*std::make_shared<SmallModel>())));
  });
}

TEST(FullyShard, ModuleHasShardedParametersBetweenForwards) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    shard(model, {.mesh = line(world)});
    const auto before = model.parameters();
    rank_backward(model, *world, 0);
    EXPECT_TRUE(is_dtensor(model.layers[0]->up));
    EXPECT_TRUE(is_dtensor(model.head));
    EXPECT_TRUE(model.head.is_same(model.embedding));
    const auto after = model.parameters();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].is_same(after[i]));
    EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
    EXPECT_EQ(fsdp_stats(model).unsharded_bytes, 0);
  });
}

struct TwoLayers : nn::Callable<TwoLayers> {
  std::shared_ptr<Layer> first, second;
  TwoLayers() {
    Values values(3);
    first = register_module("0", std::make_shared<Layer>(values, 6, 10));
    second = register_module("1", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(x)); }
};

TEST(FullyShard, HasTheCollectivesPerStepOfFsdp2) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool keep : {false, true}) {
      TwoLayers model;
      const FullyShardOptions options = {.mesh = line(world),
                                         .reshard_after_forward = keep ? std::optional(false) : std::nullopt};
      fully_shard(*model.first, options);
      fully_shard(*model.second, options);
      fully_shard(model, {.mesh = options.mesh});
      for (int step = 0; step < 2; ++step) {
        model(here(at::ones({3, 6}))).sum().backward();
        EXPECT_EQ(fsdp_stats(model).all_gathers, keep ? 2 : 4);
        EXPECT_EQ(fsdp_stats(model).reduce_scatters, 2);
        EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
        EXPECT_LE(fsdp_stats(model).peak_unsharded_groups, 2);
        reset_fsdp_stats(model);
      }
    }
  });
}

TEST(FullyShard, KeepsAtMostTwoGroupsAndTheRootUnsharded) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool prefetch : {false, true}) {
      SmallModel model(6);
      shard(model, {.mesh = line(world)});
      set_prefetch(model, prefetch);
      for (int step = 0; step < 3; ++step) rank_backward(model, *world, step);
      EXPECT_EQ(fsdp_stats(model).peak_unsharded_groups, prefetch ? 3 : 2);
      EXPECT_EQ(fsdp_stats(model).all_gathers, 3 * (6 + 6 + 1));
      EXPECT_EQ(fsdp_stats(model).reduce_scatters, 3 * 7);
    }
  });
}

std::vector<at::Tensor> parameters_after_training(const std::shared_ptr<comm::World>& world, bool prefetch,
                                                  const FullyShardOptions& options) {
  SmallModel model;
  shard(model, options);
  set_prefetch(model, prefetch);
  auto optimizer = optim::make_adamw(model, {.lr = 1e-2});
  for (int step = 0; step < 3; ++step) {
    rank_backward(model, *world, step);
    optimizer->step();
    optimizer->zero_grad();
  }
  return whole_parameters(model);
}

TEST(FullyShard, IsBitwiseReproducibleWithAndWithoutPrefetch) {
  on_threads(3, [](const WorldPtr& world) {
    const auto mesh = line(world);
    const auto first = parameters_after_training(world, true, {.mesh = mesh});
    EXPECT_TRUE(same_bits(first, parameters_after_training(world, true, {.mesh = mesh})));
    EXPECT_TRUE(same_bits(first, parameters_after_training(world, false, {.mesh = mesh})));
    EXPECT_TRUE(
        same_bits(first, parameters_after_training(world, true, {.mesh = mesh, .reshard_after_forward = false})));
  });
}

// Micro-batches with and without synchronization, in every combination, give the gradient of the whole batch.
TEST(FullyShard, AccumulatesWithAndWithoutSynchronisation) {
  on_threads(3, [](const WorldPtr& world) {
    const int micro_batches = 3;
    for (int mask = 0; mask < 4; ++mask) {
      for (const bool keep : {false, true}) {
        SmallModel plain, sharded;
        shard(sharded, {.mesh = line(world), .reshard_after_forward = !keep});
        set_gradient_divide_factor(sharded, 1);
        for (int i = 0; i < micro_batches; ++i) {
          plain_backward(plain, i);
          const bool synchronise = i + 1 == micro_batches || (mask >> i & 1) != 0;
          set_requires_gradient_sync(sharded, synchronise);
          const auto before = fsdp_stats(sharded).reduce_scatters;
          rank_backward(sharded, *world, i);
          EXPECT_EQ(fsdp_stats(sharded).reduce_scatters - before, synchronise ? 4 : 0);
          EXPECT_TRUE(mask != 0 || synchronise || !sharded.parameters()[0].grad().defined());
        }
        EXPECT_LT(distance(whole_gradients(sharded), whole_gradients(plain)), kTolerance) << "mask " << mask;
      }
    }
  });
}

struct Siamese : nn::Callable<Siamese> {
  std::shared_ptr<Layer> layer;
  Siamese() {
    Values values(5);
    layer = register_module("layer", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return (*layer)((*layer)(x)) * (*layer)(x * 2); }
};

TEST(FullyShard, AllowsAModuleToRunSeveralTimesInOneForward) {
  on_threads(2, [](const WorldPtr& world) {
    Siamese plain, sharded;
    fully_shard(*sharded.layer, {.mesh = line(world)});
    fully_shard(sharded, {.mesh = line(world)});
    set_prefetch(sharded, true);
    const auto input = Values(9)({4, 6});
    for (int step = 0; step < 2; ++step) {
      plain(input).sum().backward();
      sharded(input).sum().backward();
    }
    EXPECT_LT(distance(whole_gradients(sharded), whole_gradients(plain)), kTolerance);
  });
}

TEST(FullyShard, LeavesFrozenParametersWithoutGradients) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain, sharded;
    for (auto* model : {&plain, &sharded}) {
      model->layers[1]->set_requires_grad(false);
      model->layers[0]->parameters()[1].set_requires_grad(false);
    }
    shard(sharded, {.mesh = line(world)});
    set_gradient_divide_factor(sharded, 1);
    plain_backward(plain, 0);
    rank_backward(sharded, *world, 0);
    EXPECT_FALSE(sharded.layers[1]->parameters()[0].grad().defined());
    EXPECT_LT(distance(whole_gradients(sharded), whole_gradients(plain)), kTolerance);
    EXPECT_EQ(fsdp_stats(sharded).reduce_scatters, 3);
  });
}

TEST(FullyShard, ReshardsFrozenGroupsInBackward) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model(6);
    for (auto& layer : model.layers) layer->set_requires_grad(false);
    shard(model, {.mesh = line(world)});
    set_prefetch(model, false);
    for (int step = 0; step < 2; ++step) rank_backward(model, *world, step);
    EXPECT_EQ(fsdp_stats(model).peak_unsharded_groups, 2);
    EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
    EXPECT_EQ(fsdp_stats(model).reduce_scatters, 2);
  });
}

TEST(FullyShard, UnshardsAndReshardsManually) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain, model;
    shard(model, {.mesh = line(world)});
    unshard(*model.layers[0]);
    EXPECT_FALSE(is_dtensor(model.layers[0]->up));
    EXPECT_TRUE(model.layers[0]->up.equal(plain.layers[0]->up));
    EXPECT_TRUE(is_dtensor(model.layers[0]->parameters()[1]));
    reshard(*model.layers[0]);
    EXPECT_TRUE(is_dtensor(model.layers[0]->up));
    unshard(*model.layers[0]);
    rank_backward(model, *world, 0);
    EXPECT_EQ(fsdp_stats(model).all_gathers, 7 - 1);
    EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
  });
}

TEST(FullyShard, RefusesForwardUntilAMetaModelIsMaterialised) {
  on_threads(3, [](const WorldPtr& world) {
    SmallModel plain, sharded(3, at::TensorOptions(at::kFloat).device(at::kMeta));
    shard(sharded, {.mesh = line(world)});
    EXPECT_TRUE(to_local(sharded.embedding).is_meta());
    EXPECT_THAT(error_of([&] { sharded(tokens_of(0)); }),
                HasSubstr("still on the meta device: embedding, norm, layers.0.norm, layers.0.up"));
    EXPECT_THAT(error_of([&] { optim::make_adamw(sharded, {}); }), HasSubstr("found a parameter on the meta device"));
    to_empty(sharded, test_device());
    EXPECT_TRUE(sharded.head.is_same(sharded.embedding));
    EXPECT_TRUE(sharded.parameters()[0].requires_grad());
    {
      at::NoGradGuard no_grad;
      const auto from = plain.parameters(), to = sharded.parameters();
      for (size_t i = 0; i < to.size(); ++i) {
        const auto box = local_box(to[i].sizes().vec(), *device_mesh(to[i]), placements(to[i]));
        if (box.shape[0] > 0) to_local(to[i]).copy_(from[i].narrow(0, box.offset[0], box.shape[0]));
      }
    }
    set_gradient_divide_factor(sharded, 1);
    plain_backward(plain, 0);
    rank_backward(sharded, *world, 0);
    EXPECT_LT(distance(whole_gradients(sharded), whole_gradients(plain)), kTolerance);
  });
}

TEST(FullyShard, RefusesAParameterReplacedByAnUnshardedTensor) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    shard(model, {.mesh = line(world)});
    nn::Module::set_parameter(*model.named_parameters(true)[2].slot, here(at::ones({6})).set_requires_grad(true));
    EXPECT_THAT(error_of([&] { model(tokens_of(0)); }),
                HasSubstr("norm: the parameter was replaced by a tensor with another mesh"));
  });
}

struct Leaky : nn::Callable<Leaky> {
  std::shared_ptr<Layer> layer;
  Leaky() {
    Values values(5);
    layer = register_module("layer", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return (*layer)(x); }
};

TEST(FullyShard, ReportsTheModuleWhoseFreedParametersBackwardReads) {
  on_threads(2, [](const WorldPtr& world) {
    Leaky model;
    fully_shard(*model.layer, {.mesh = line(world)});
    fully_shard(model, {.mesh = line(world)});
    at::Tensor leaked;
    // The hook runs after fully_shard's pre-forward hook, so the hook receives the unsharded parameters.
    model.layer->register_forward_pre_hook(
        [&](nn::Module&, nn::TensorRefs& inputs) { leaked = at::linear(*inputs[0], model.layer->up).sum(); });
    const auto input = here(at::ones({2, 6})).set_requires_grad(true);
    model(input);
    EXPECT_THAT(error_of([&] { leaked.backward(); }), HasSubstr("layer: its parameters are freed"));
  });
}

TEST(FullyShard, RefusesInvalidParametersAndMeshes) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line(world);
    const auto shard_one = [&](at::Tensor value) {
      struct One : nn::Callable<One> {
        at::Tensor weight;
      };
      struct Holder : One {
        explicit Holder(at::Tensor value) { register_parameter("weight", weight, std::move(value)); }
      } holder(std::move(value));
      return error_of([&] { fully_shard(holder, {.mesh = mesh}); });
    };
    EXPECT_THAT(shard_one(here(at::ones({}))), HasSubstr("weight: fully_shard doesn't support scalar parameters"));
    EXPECT_THAT(shard_one(here(at::ones({4, 3})).t()),
                HasSubstr("weight: FSDP does not support non-contiguous parameters"));
    EXPECT_EQ(shard_one(here(at::ones({4, 3}))), "");
    SmallModel model;
    EXPECT_THAT(error_of([&] { fully_shard(model, {}); }), HasSubstr("no mesh given"));
    EXPECT_THAT(error_of([&] { set_prefetch(model, true); }), HasSubstr("Call fully_shard first"));
    fully_shard(*model.layers[0], {.mesh = mesh});
    EXPECT_THAT(error_of([&] { fully_shard(*model.layers[0], {.mesh = mesh}); }), HasSubstr("on this module already"));
    EXPECT_THAT(error_of([&] { unshard(model); }), HasSubstr("not sharded itself"));
    const auto unnamed = init_device_mesh(world, test_device_type(), {1, 2});
    EXPECT_THAT(error_of([&] { fully_shard(model, {.mesh = unnamed}); }), HasSubstr("needs dim names"));
    const auto cube = init_device_mesh(world, test_device_type(), {1, 1, 2}, {"a", "b", "c"});
    EXPECT_THAT(error_of([&] { fully_shard(model, {.mesh = cube}); }),
                HasSubstr("expects a 1D or 2D DeviceMesh but got DeviceMesh("));
  });
}

TEST(FullyShard, RefusesTiesAcrossGroupsAndChildForwardsBeforeTheRoot) {
  on_threads(2, [](const WorldPtr& world) {
    TiedToItsLayer tied;
    const auto mesh = line(world);
    fully_shard(*tied.layer, {.mesh = mesh});
    EXPECT_THAT(error_of([&] { fully_shard(tied, {.mesh = mesh}); }),
                HasSubstr("copy: shared with a parameter already managed by another FSDP group"));
    SmallModel model;
    shard(model, {.mesh = mesh});
    (*model.layers[1])(here(at::ones({2, 6})));
    EXPECT_THAT(
        error_of([&] { model(tokens_of(0)); }),
        HasSubstr(
            "'layers.1': its forward ran before that of the root above it. Run forward through the root module first"));
  });
}

}  // namespace
}  // namespace tessera::testing
