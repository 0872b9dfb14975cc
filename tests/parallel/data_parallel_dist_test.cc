// Tests of the properties that all kinds of data parallelism share: gradients and optimizer steps are equal to those of
// one process.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

struct Strategy {
  std::string name;
  bool sharded = false;
  FullyShardOptions shard = {};
  ReplicateOptions replicate = {};

  void apply(nn::Module& model, const std::vector<nn::Module*>& blocks, const WorldPtr& world) const {
    const std::string dim = sharded ? "dp_shard" : "dp_replicate";
    data_parallel(model, blocks,
                  {.mesh = init_device_mesh(world, test_device_type(), {world->size()}, {dim}),
                   .shard = shard,
                   .replicate = replicate});
  }
  void apply(SmallModel& model, const WorldPtr& world) const { apply(model, blocks_of(model), world); }
};

// The limits are small, so that SmallModel fills several buckets.
constexpr int64_t kBucket = 600, kFirstBucket = 100;

const Strategy& named(const std::string& name) {
  static const std::vector<Strategy> all = {
      {.name = "FullyShard", .sharded = true},
      {.name = "FullyShardKeeping", .sharded = true, .shard = {.reshard_after_forward = false}},
      {.name = "Replicate", .replicate = {.bucket_bytes = kBucket, .first_bucket_bytes = kFirstBucket}},
      {.name = "ReplicateInOrder",
       .replicate = {.bucket_bytes = kBucket, .first_bucket_bytes = kFirstBucket, .rebuild_buckets = false}},
      {.name = "ReplicateFindingUnused",
       .replicate = {.bucket_bytes = kBucket, .first_bucket_bytes = kFirstBucket, .find_unused_parameters = true}},
      {.name = "ReplicateStatic",
       .replicate = {.bucket_bytes = kBucket, .first_bucket_bytes = kFirstBucket, .static_graph = true}},
  };
  for (const auto& one : all) {
    if (one.name == name) return one;
  }
  throw std::out_of_range(name);
}

class DataParallelStrategy : public ::testing::TestWithParam<const char*> {
 protected:
  const Strategy& strategy = named(GetParam());
};
const auto name_of = [](const auto& info) { return std::string(info.param); };
INSTANTIATE_TEST_SUITE_P(, DataParallelStrategy,
                         ::testing::Values("FullyShard", "FullyShardKeeping", "Replicate", "ReplicateInOrder",
                                           "ReplicateFindingUnused", "ReplicateStatic"),
                         name_of);

using Apply = std::function<void(SmallModel&)>;

// Runs steps of AdamW with uneven rows per rank, and compares gradients and parameters after every step. The steps run
// in float64, because Adam magnifies the rounding of gradients that are close to zero.
void expect_trains_like_one_process(const WorldPtr& world, const Apply& apply) {
  SmallModel plain(3, at::kDouble), model(3, at::kDouble);
  apply(model);
  set_gradient_divide_factor(model, 1);
  auto plain_optimizer = optim::make_adamw(plain, {.lr = 1e-2, .weight_decay = 0.1});
  auto optimizer = optim::make_adamw(model, {.lr = 1e-2, .weight_decay = 0.1});
  for (int step = 0; step < 3; ++step) {
    const int64_t rows = 11 + step;
    plain_backward(plain, step, rows);
    rank_backward(model, *world, step, rows);
    ASSERT_LT(distance(whole_gradients(model), whole_gradients(plain)), 1e-10) << "gradients of step " << step;
    plain_optimizer->step();
    optimizer->step();
    ASSERT_LT(distance(whole_parameters(model), whole_parameters(plain)), 1e-10) << "after step " << step;
    plain_optimizer->zero_grad();
    optimizer->zero_grad();
  }
}

TESSERA_RANKS_TEST(FullyShard, TrainsLikeOneProcess, (1, 2, 3, 4)) {
  expect_trains_like_one_process(world, [&](SmallModel& model) { named("FullyShard").apply(model, world); });
}
TESSERA_RANKS_TEST(Replicate, TrainsLikeOneProcess, (1, 2, 3)) {
  expect_trains_like_one_process(world, [&](SmallModel& model) { named("Replicate").apply(model, world); });
}

TEST_P(DataParallelStrategy, TrainsLikeOneProcess) {
  on_threads(2, [&](const WorldPtr& world) {
    expect_trains_like_one_process(world, [&](SmallModel& model) { strategy.apply(model, world); });
  });
}

TEST(FullyShard, ReplicatesOverTheFirstDimOfA2dMesh) {
  for (const auto& shape : {std::vector<int64_t>{2, 2}, {1, 4}, {4, 1}}) {
    on_threads(4, [&](const WorldPtr& world) {
      const auto mesh = init_device_mesh(world, test_device_type(), shape, {"replicate", "shard"});
      expect_trains_like_one_process(world, [&](SmallModel& model) {
        shard(model, {.mesh = mesh});
        EXPECT_EQ(to_string(placements(model.norm)), "(R, S(0))");
      });
    });
  }
}

TEST_P(DataParallelStrategy, AveragesGradientsOverTheRanksByDefault) {
  on_threads(3, [&](const WorldPtr& world) {
    SmallModel summed, averaged;
    for (auto* model : {&summed, &averaged}) strategy.apply(*model, world);
    set_gradient_divide_factor(summed, 1);
    for (auto* model : {&summed, &averaged}) rank_backward(*model, *world, 0);
    auto expected = whole_gradients(summed);
    for (auto& gradient : expected) gradient.div_(3);
    EXPECT_LT(distance(whole_gradients(averaged), expected), kTolerance);
    for (const auto& parameter : averaged.parameters()) EXPECT_EQ(is_dtensor(parameter), strategy.sharded);
  });
}

TEST_P(DataParallelStrategy, AddsGradientsOfSeveralForwards) {
  on_threads(2, [&](const WorldPtr& world) {
    for (const bool together : {true, false}) {
      if (!together && strategy.replicate.static_graph) continue;  // a static graph promises one backward per step
      SmallModel plain, model;
      strategy.apply(model, world);
      set_gradient_divide_factor(model, 1);
      for (int step = 0; step < 2; ++step) {
        std::vector<at::Tensor> losses;
        for (int i = 0; i < 2; ++i) {
          plain_backward(plain, i);
          const auto rows = rows_of_rank(tokens_of(i), world->rank(), world->size());
          losses.push_back(loss_sum(model(rows), rows) / 48.0);
        }
        if (together) {
          (losses[0] + losses[1]).backward();
        } else {
          losses[0].backward();
          losses[1].backward();
        }
      }
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
      if (strategy.sharded) {
        EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
      }
    }
  });
}

struct Branches : nn::Callable<Branches> {
  at::Tensor always, sometimes, never;
  Branches() {
    Values values(2);
    register_parameter("always", always, values({5, 4}));
    register_parameter("sometimes", sometimes, values({3, 4}));
    register_parameter("never", never, values({7, 4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = at::linear(x, always).sum();
    return x.size(0) > 2 ? y + at::linear(x, sometimes).sum() : y;
  }
};

TEST_P(DataParallelStrategy, GivesUnusedParametersNoGradientUnlessSomeRankUsedThem) {
  if (strategy.replicate.static_graph) {
    GTEST_SKIP() << "ranks and steps use the same parameters in a static graph";
  }
  on_threads(3, [&](const WorldPtr& world) {
    Branches plain, model;
    strategy.apply(model, {}, world);
    set_gradient_divide_factor(model, 1);
    const std::vector<int64_t> rows = {2, 3, 1};
    const int64_t n = rows[static_cast<size_t>(world->rank())];
    for (int step = 0; step < 2; ++step) {
      for (const int64_t each : rows) plain(here(at::full({each, 4}, 0.5 * each))).backward();
      model(here(at::full({n, 4}, 0.5 * n))).backward();
      EXPECT_FALSE(model.parameters()[2].grad().defined());
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
    }
    // The parameter is not used now, so its gradient must not change.
    const auto before = whole(model.parameters()[1].grad()).clone();
    model(here(at::ones({1, 4}))).backward();
    EXPECT_TRUE(whole(model.parameters()[1].grad()).equal(before));
  });
}

TEST_P(DataParallelStrategy, TrainsParametersThatALoadReplaced) {
  on_threads(2, [&](const WorldPtr& world) {
    SmallModel plain, model(3, at::kFloat, /*seed=*/99);
    strategy.apply(model, world);
    if (!strategy.sharded) rank_backward(model, *world, 0);  // the replicas have buckets after this backward
    const auto from = plain.named_parameters(true), to = model.named_parameters(true);
    for (size_t i = 0; i < to.size(); ++i) {
      auto value = from[i].slot->parameter.detach().clone();
      if (strategy.sharded) {
        value = distribute_tensor(value, device_mesh(to[i].slot->parameter), {Shard(0)}, std::nullopt);
      }
      if (to[i].name == "head") value = to[0].slot->parameter;  // tied to the new parameter of the embedding
      nn::Module::set_parameter(*to[i].slot, value.set_requires_grad(true));
    }
    set_gradient_divide_factor(model, 1);
    plain_backward(plain, 1);
    rank_backward(model, *world, 1);
    EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
  });
}

TEST_P(DataParallelStrategy, RecoversAfterAnException) {
  on_threads(2, [&](const WorldPtr& world) {
    SmallModel clean, model;
    for (auto* each : {&clean, &model}) strategy.apply(*each, world);
    rank_backward(model, *world, 0);
    model.zero_grad();
    const auto failing = model.layers[0]->register_forward_hook([](nn::Module&, nn::TensorRefs& outputs) {
      outputs[0]->register_hook([](const at::Tensor&) { throw std::runtime_error("hook failed"); });
    });
    EXPECT_THAT(error_of([&] { rank_backward(model, *world, 1); }), HasSubstr("hook failed"));  // with work in progress
    model.layers[0]->remove_hook(failing);
    model.zero_grad();
    EXPECT_NE(error_of([&] { model(here(at::full({1, 5}, 1000, at::kLong))); }), "");  // tokens outside the vocabulary
    rank_backward(clean, *world, 0);
    clean.zero_grad();
    for (auto* each : {&clean, &model}) rank_backward(*each, *world, 2);
    EXPECT_TRUE(same_bits(whole_gradients(model), whole_gradients(clean)));
    if (strategy.sharded) {
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
    }
    EXPECT_EQ(is_dtensor(model.embedding), strategy.sharded);
    EXPECT_TRUE(model.embedding.is_leaf());
  });
}

TEST(DataParallel, ReplicatesTensorParallelParametersOverTheOtherMeshDim) {
  on_threads(4, [](const WorldPtr& world) {
    struct Mlp : nn::Callable<Mlp> {
      at::Tensor up, down, gain;
      Mlp() {
        Values values(8, at::kDouble);
        register_parameter("up", up, values({6, 4}));
        register_parameter("down", down, values({4, 6}));
        register_parameter("gain", gain, values({4}));
      }
      at::Tensor forward(const at::Tensor& x) { return at::linear(at::gelu(at::linear(x * gain, up)), down); }
    } plain, model;
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"dp_replicate", "tp"});
    const auto tp = mesh->slice({"tp"});
    const std::vector<Placements> wanted = {{Shard(0)}, {Shard(1)}, {Replicate()}};
    const auto slots = model.named_parameters();
    for (size_t i = 0; i < slots.size(); ++i) {
      const auto value = distribute_tensor(slots[i].slot->parameter.detach(), tp, wanted[i]);
      nn::Module::set_parameter(*slots[i].slot, value.set_requires_grad(true));
    }
    data_parallel(model, {}, {.mesh = mesh, .replicate = {.bucket_bytes = 64, .first_bucket_bytes = 64}});
    set_gradient_divide_factor(model, 1);
    for (int step = 0; step < 2; ++step) {
      const auto rows = Values(static_cast<uint64_t>(step), at::kDouble)({6, 4});
      plain(rows).square().sum().backward();
      const auto own = rows_of_rank(rows, static_cast<int>(mesh->local_rank(0)), 2);
      full_tensor(model(from_local(own, tp, {Replicate()}))).square().sum().backward();
    }
    for (size_t i = 0; i < slots.size(); ++i) EXPECT_EQ(placements(model.parameters()[i].grad()), wanted[i]);
    EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), 1e-12);
  });
}

TEST(DataParallel, MeshDimsSelectFsdpHsdpOrDdp) {
  on_threads(4, [](const WorldPtr& world) {
    struct Case {
      std::vector<int64_t> shape;
      std::vector<std::string> names;
      bool sharded;
    };
    for (const auto& [shape, names, sharded] :
         {Case{{4, 1}, {"dp_replicate", "dp_shard"}, false}, Case{{1, 4}, {"dp_replicate", "dp_shard"}, true},
          Case{{2, 2}, {"dp_replicate", "dp_shard"}, true}, Case{{4}, {"dp_replicate"}, false},
          Case{{4}, {"dp_shard"}, true}}) {
      const auto mesh = init_device_mesh(world, test_device_type(), shape, names);
      SmallModel plain, model;
      data_parallel(model, blocks_of(model), {.mesh = mesh});
      set_gradient_divide_factor(model, 1);
      EXPECT_EQ(is_dtensor(model.parameters()[0]), sharded) << mesh->to_string();
      plain_backward(plain, 0);
      rank_backward(model, *world, 0);
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance) << mesh->to_string();
    }
    SmallModel model;
    EXPECT_THAT(error_of([&] { data_parallel(model, {}, {.mesh = line(world)}); }),
                HasSubstr("neither a dim dp_replicate nor dp_shard"));
  });
}

}  // namespace
}  // namespace tessera::testing
