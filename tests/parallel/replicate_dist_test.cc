// Tests of replicate (DDP): buckets, their order and overlap, accumulation, unused parameters, recomputation, dtypes
// and errors. Gradients are compared with one process.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/ddp/bucket_plan.h"
#include "tessera/parallel/ddp/replicate.h"
#include "tests/parallel/checkpointed.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The bucket size is small, so that SmallModel fills several buckets.
ReplicateOptions small_buckets(const WorldPtr& world, int64_t bytes = 600) {
  return {.mesh = line(world), .bucket_bytes = bytes, .first_bucket_bytes = 100};
}

// ---- buckets ----

TEST(BucketPlan, ClosesABucketAtItsLimit) {
  using Plan = std::vector<std::vector<size_t>>;
  EXPECT_EQ(assign_buckets({{10, at::kFloat}, {10, at::kFloat}, {30, at::kFloat}, {5, at::kFloat}}, 10, 40),
            (Plan{{0}, {1, 2}, {3}}));
  EXPECT_EQ(assign_buckets({{10, at::kFloat}, {10, at::kHalf}, {30, at::kFloat}, {5, at::kHalf}}, 1000, 1000),
            (Plan{{0, 2}, {1, 3}}));
  EXPECT_EQ(assign_buckets({}, 10, 40), Plan{});
}

TEST(Replicate, ReducesOncePerBucket) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;  // 13 parameters: embedding 264 bytes, norm 24, a layer 24 + 240 + 240 + 24
    replicate(model, small_buckets(world, 500));
    for (int step = 0; step < 3; ++step) {
      rank_backward(model, *world, step);
      // The order is the reverse of registration and of use. The last layer's bias and down close the first bucket. Up
      // and norm of a layer, with bias and down of the layer before, reach 500 bytes, twice. The last bucket has the
      // remaining parameters with the norm and the embedding.
      EXPECT_EQ(replicate_stats(model).buckets, 4);
      EXPECT_EQ(replicate_stats(model).all_reduces, 4);
      reset_replicate_stats(model);
    }
    SmallModel one;
    replicate(one, {.mesh = line(world)});
    rank_backward(one, *world, 0);
    EXPECT_EQ(replicate_stats(one).all_reduces, 1);
  });
}

// Number of bucket reductions that had started when backward reached the input of the first layer, in each of three
// steps.
std::vector<int64_t> reductions_at_first_layer(const WorldPtr& world, SmallModel& model) {
  int64_t seen = 0;
  const auto hook = model.layers[0]->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
    if (inputs[0]->requires_grad()) {
      inputs[0]->register_hook([&](const at::Tensor&) { seen = replicate_stats(model).all_reduces; });
    }
  });
  std::vector<int64_t> counts;
  for (int step = 0; step < 3; ++step) {
    seen = 0;
    reset_replicate_stats(model);
    rank_backward(model, *world, step);
    counts.push_back(seen);
    EXPECT_GE(replicate_stats(model).overlapped, seen);
    EXPECT_EQ(replicate_stats(model).all_reduces, replicate_stats(model).buckets);
  }
  model.layers[0]->remove_hook(hook);
  return counts;
}

TEST(Replicate, StartsReductionsBeforeBackwardEnds) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    replicate(model, small_buckets(world, 500));
    EXPECT_EQ(reductions_at_first_layer(world, model), (std::vector<int64_t>{3, 3, 3}));  // all but the embedding's
    EXPECT_EQ(replicate_stats(model).overlapped, 4);
  });
}

struct BackToFront : nn::Callable<BackToFront> {
  std::shared_ptr<Layer> first, second, third;  // registered in the reverse order of use
  explicit BackToFront(at::TensorOptions options = at::kFloat) {
    Values values(3, options);
    third = register_module("third", std::make_shared<Layer>(values, 6, 10));
    second = register_module("second", std::make_shared<Layer>(values, 6, 10));
    first = register_module("first", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return (*third)((*second)((*first)(x))); }
};

TEST(Replicate, RebuildsBucketsInTheOrderOfUse) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool learn : {true, false}) {
      BackToFront plain(at::kDouble), model(at::kDouble);
      auto options = small_buckets(world, 1000);
      options.rebuild_buckets = learn;
      replicate(model, options);
      std::vector<int64_t> before_first;
      for (int step = 0; step < 2; ++step) {
        reset_replicate_stats(model);
        const auto input = Values(20 + static_cast<uint64_t>(step), at::kDouble)({4, 6});
        plain(input).sum().backward();
        const auto id = model.first->register_forward_hook([&](nn::Module&, nn::TensorRefs& outputs) {
          outputs[0]->register_hook(
              [&](const at::Tensor&) { before_first.push_back(replicate_stats(model).all_reduces); });
        });
        model(input).sum().backward();
        model.first->remove_hook(id);
      }
      EXPECT_EQ(before_first[0], 0);
      EXPECT_EQ(before_first[1] > 0, learn);
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), 1e-12);
    }
  });
}

TEST(Replicate, AcceptsBackwardOfAForwardBeforeBucketsWereRebuilt) {
  on_threads(2, [](const WorldPtr& world) {
    BackToFront plain, model;
    replicate(model, small_buckets(world, 1000));
    const auto input = Values(9)({4, 6});
    const auto first = model(input).sum(), second = model(input * 2).sum();
    first.backward();   // this backward learns another order
    second.backward();  // backward of a graph from before the new order
    plain(input).sum().backward();
    plain(input * 2).sum().backward();
    EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
  });
}

TEST(Replicate, IsBitwiseReproducible) {
  on_threads(3, [](const WorldPtr& world) {
    const auto train = [&](const ReplicateOptions& options) {
      SmallModel model;
      replicate(model, options);
      auto optimizer = optim::make_adamw(model, {.lr = 1e-2});
      for (int step = 0; step < 3; ++step) {
        rank_backward(model, *world, step);
        optimizer->step();
        optimizer->zero_grad();
      }
      return whole_parameters(model);
    };
    const auto first = train(small_buckets(world));
    EXPECT_TRUE(same_bits(first, train(small_buckets(world))));
    // The gradients are equal on every rank, too.
    for (const auto& parameter : first) {
      const auto own = parameter.cpu();
      auto other = own.clone();
      comm::broadcast(*world->group(), other).wait();
      EXPECT_TRUE(other.equal(own));
    }
  });
}

// ---- accumulation ----

// Micro-batches with and without synchronization, in every combination, give the gradient of the whole batch.
TEST(Replicate, AccumulatesWithAndWithoutSynchronisation) {
  on_threads(3, [](const WorldPtr& world) {
    for (int mask = 0; mask < 4; ++mask) {
      for (const bool find_unused : {false, true}) {
        SmallModel plain, model;
        auto options = small_buckets(world);
        options.find_unused_parameters = find_unused;
        replicate(model, options);
        set_gradient_divide_factor(model, 1);
        for (int i = 0; i < 3; ++i) {
          plain_backward(plain, i);
          const bool synchronise = i == 2 || (mask >> i & 1) != 0;
          std::optional<NoSync> local;
          if (!synchronise) local.emplace(model);
          reset_replicate_stats(model);
          rank_backward(model, *world, i);
          EXPECT_EQ(replicate_stats(model).all_reduces, synchronise ? replicate_stats(model).buckets : 0);
        }
        EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance) << "mask " << mask;
      }
    }
  });
}

TEST(Replicate, NoSyncGradientsAreLocalAndZeroGradClearsThem) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain, alone, model;
    replicate(model, small_buckets(world));
    {
      NoSync local(model);
      rank_backward(model, *world, 0);
      rank_backward(alone, *world, 0);
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(alone)), kTolerance);  // gradient of this rank only
      rank_backward(model, *world, 1);
      rank_backward(alone, *world, 1);
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(alone)), kTolerance);
      model.zero_grad();
    }
    set_gradient_divide_factor(model, 1);
    rank_backward(model, *world, 2);
    plain_backward(plain, 2);
    EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
  });
}

// ---- parameters that are not used ----

// The first buckets belong to a layer that forward skips. If the unused parameters are known, the other buckets can
// start early.
struct Skipping : nn::Callable<Skipping> {
  std::shared_ptr<Layer> first, second, skipped;
  Skipping() {
    Values values(4);
    first = register_module("first", std::make_shared<Layer>(values, 6, 10));
    second = register_module("second", std::make_shared<Layer>(values, 6, 10));
    skipped = register_module("skipped", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(x)); }
};

TEST(Replicate, OverlapsReductionsWhenUnusedParametersAreKnown) {
  on_threads(2, [](const WorldPtr& world) {
    const auto overlapped = [&](bool find_unused, bool static_graph) {
      Skipping model;
      replicate(model, {.mesh = line(world),
                        .bucket_bytes = 500,
                        .first_bucket_bytes = 100,
                        .find_unused_parameters = find_unused,
                        .static_graph = static_graph,
                        .rebuild_buckets = false});
      std::vector<int64_t> counts;
      for (int step = 0; step < 2; ++step) {
        reset_replicate_stats(model);
        model(here(at::ones({2, 6}))).sum().backward();
        counts.push_back(replicate_stats(model).overlapped);
        EXPECT_FALSE(model.skipped->parameters()[0].grad().defined());
      }
      EXPECT_EQ(replicate_stats(model).buckets, 4);
      return counts;
    };
    EXPECT_EQ(overlapped(false, false), (std::vector<int64_t>{0, 0}));
    EXPECT_EQ(overlapped(true, false), (std::vector<int64_t>{4, 4}));
    EXPECT_EQ(overlapped(false, true), (std::vector<int64_t>{0, 4}));
  });
}

TEST(Replicate, FrozenParametersHaveNoGradientsUntilUnfrozen) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain, model;
    replicate(model, small_buckets(world));
    set_gradient_divide_factor(model, 1);
    for (const bool frozen : {true, false, true}) {
      for (auto* each : {&plain, &model}) {
        each->layers[1]->set_requires_grad(!frozen);
        each->zero_grad();
      }
      plain_backward(plain, 0);
      rank_backward(model, *world, 0);
      EXPECT_EQ(model.layers[1]->parameters()[0].grad().defined(), !frozen);
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
    }
  });
}

// ---- recomputation inside backward ----

TEST(Replicate, SupportsReentrantCheckpointsWithAStaticGraph) {
  on_threads(2, [](const WorldPtr& world) {
    Checkpointed plain({false, false, false}), model({true, true, true});
    replicate(model, {.mesh = line(world), .bucket_bytes = 700, .first_bucket_bytes = 700, .static_graph = true});
    set_gradient_divide_factor(model, 1);
    for (int step = 0; step < 4; ++step) {
      reset_replicate_stats(model);
      for (int rank = 0; rank < 2; ++rank) {
        const auto input = Values(static_cast<uint64_t>(10 * step + rank))({4, 6}).set_requires_grad(true);
        plain(input).sum().backward();
        if (rank == world->rank()) model(input).sum().backward();
      }
      ASSERT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance) << "step " << step;
    }
    EXPECT_GT(replicate_stats(model).overlapped, 0);  // the graph was learned in the first step
  });
}

TEST(Replicate, ReportsAGradientAfterItsBucketWasReduced) {
  on_threads(2, [](const WorldPtr& world) {
    Checkpointed model({true, true, true});
    // One bucket spans two layers, so each checkpoint adds a part of the bucket.
    replicate(model, {.mesh = line(world), .bucket_bytes = 700, .first_bucket_bytes = 700, .rebuild_buckets = false});
    const auto run = [&] { model(Values(1)({4, 6}).set_requires_grad(true)).sum().backward(); };
    EXPECT_THAT(error_of(run), HasSubstr("a gradient came after its bucket had been reduced. Set static_graph"));
  });
}

// ---- dtypes ----

struct Mixed : nn::Callable<Mixed> {
  at::Tensor a, b, c, scale;
  Mixed() {
    Values values(6);
    register_parameter("a", a, values({4, 5}));
    register_parameter("b", b, values({3, 4}).to(at::kDouble));
    register_parameter("c", c, values({5, 4}).t());  // not contiguous
    register_parameter("scale", scale, here(at::full({}, 0.7)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = at::linear(x, a) + at::linear(x, c);
    return at::linear(y.to(at::kDouble), b).sum() * scale;
  }
};

TEST(Replicate, ReducesEachDtypeInItsOwnBuckets) {
  on_threads(3, [](const WorldPtr& world) {
    Mixed plain, model;
    replicate(model, {.mesh = line(world)});
    set_gradient_divide_factor(model, 1);
    for (int step = 0; step < 2; ++step) {
      for (int rank = 0; rank < 3; ++rank) {
        const auto input = Values(static_cast<uint64_t>(rank))({2, 5});
        plain(input).backward();
        if (rank == world->rank()) model(input).backward();
      }
    }
    EXPECT_EQ(replicate_stats(model).buckets, 2);
    EXPECT_EQ(model.parameters()[1].grad().scalar_type(), at::kDouble);
    EXPECT_LT(distance(whole_gradients(model), whole_gradients(plain)), kTolerance);
  });
}

TEST(Replicate, ComputesAndReducesInTheDtypesOfThePolicy) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool wide : {true, false}) {
      SmallModel low(3, at::kBFloat16), model;
      {
        const at::NoGradGuard no_grad;
        const auto from = model.parameters(), to = low.parameters();
        for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
      }
      auto options = small_buckets(world);
      options.mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat};
      if (wide) options.mp_policy.reduce_dtype = at::kFloat;
      replicate(model, options);
      const auto rows = tokens_of(0);  // both ranks have the same rows, so their mean is the gradient of one rank
      const auto logits = model(rows);
      EXPECT_EQ(logits.scalar_type(), at::kFloat);
      loss_sum(logits, rows).backward();
      loss_sum(low(rows), rows).backward();
      for (const auto& parameter : model.parameters()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
      EXPECT_LT(distance(whole_gradients(model), whole_gradients(low)), 1e-6);
      const at::NoGradGuard no_grad;
      EXPECT_LT(distance({model(rows)}, {low(rows).to(at::kFloat)}), 1e-6);
      EXPECT_EQ(model.norm.scalar_type(), at::kFloat);  // parameters have their own dtype between forwards
    }
  });
}

TEST(Replicate, DividesHalfPrecisionBeforeItOverflows) {
  on_threads(4, [](const WorldPtr& world) {
    struct One : nn::Callable<One> {
      at::Tensor weight;
      One() { register_parameter("weight", weight, here(at::ones({8}, at::kHalf))); }
      at::Tensor forward(const at::Tensor& x) { return (weight * x).sum(); }
    } model;
    replicate(model, {.mesh = line(world)});
    model(here(at::full({8}, 20000, at::kHalf))).backward();  // 80000 overflows float16
    EXPECT_TRUE(model.weight.grad().equal(here(at::full({8}, 20000, at::kHalf))));
  });
}

// ---- start, changes, errors ----

TEST(Replicate, BroadcastsParametersAndBuffersOfTheFirstRank) {
  on_threads(3, [](const WorldPtr& world) {
    struct WithBuffer : nn::Callable<WithBuffer> {
      at::Tensor weight, seen;
      explicit WithBuffer(double value) {
        register_parameter("weight", weight, here(at::full({2, 2}, value)));
        register_buffer("seen", seen, here(at::full({3}, value)));
      }
      at::Tensor forward(const at::Tensor& x) { return (x * weight).sum() + seen.sum(); }
    } model(world->rank() + 1.0);
    replicate(model, {.mesh = line(world)});
    model(here(at::ones({2, 2}))).backward();
    EXPECT_TRUE(model.weight.detach().equal(here(at::ones({2, 2}))));
    EXPECT_TRUE(model.seen.equal(here(at::ones({3}))));
    model.seen.fill_(world->rank() + 5.0);
    {
      NoSync local(model);
      model(here(at::ones({2, 2})));
    }
    EXPECT_EQ(model.seen[0].item<double>(), world->rank() + 5.0);
    model(here(at::ones({2, 2})));
    EXPECT_EQ(model.seen[0].item<double>(), 5.0);

    WithBuffer own(world->rank() + 1.0);
    replicate(own, {.mesh = line(world), .init_sync = false, .broadcast_buffers = false});
    own(here(at::ones({2, 2})));
    EXPECT_EQ(own.weight[0][0].item<double>(), world->rank() + 1.0);
    EXPECT_EQ(own.seen[0].item<double>(), world->rank() + 1.0);
  });
}

TEST(Replicate, ModuleKeepsItsParametersBetweenForwards) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    const auto before = model.parameters();
    replicate(model, small_buckets(world));
    for (int step = 0; step < 2; ++step) {
      const auto loss = loss_sum(model(tokens_of(step)), tokens_of(step));
      EXPECT_TRUE(model.embedding.is_same(before[0]));
      loss.backward();
      EXPECT_TRUE(model.head.is_same(before[0]));
      EXPECT_TRUE(model.layers[2]->up.is_leaf());
    }
    const auto after = model.parameters();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].is_same(after[i]));
  });
}

TEST(Replicate, ReportsTheParameterThatDiffersBetweenRanks) {
  on_threads(2, [](const WorldPtr& world) {
    struct Sized : nn::Callable<Sized> {
      at::Tensor first, weight;
      explicit Sized(int64_t rows) {
        register_parameter("first", first, here(at::ones({2})));
        register_parameter("weight", weight, here(at::ones({rows, 3})));
      }
      at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight).sum() + first.sum(); }
    } model(world->rank() + 4);
    replicate(model, {.mesh = line(world)});
    EXPECT_THAT(error_of([&] {
                  model(here(at::ones({1, 3})));
                }),
                HasSubstr("rank 1 of the mesh has 'weight [5, 3] Float' where rank 0 has 'weight [4, 3] Float'"));
  });
}

TEST(Replicate, RefusesInvalidMeshesAndModules) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line(world);
    SmallModel model, sharded, unfilled(1, at::TensorOptions(at::kFloat).device(at::kMeta));
    EXPECT_THAT(error_of([&] { replicate(model, {}); }), HasSubstr("found no mesh"));
    const auto square = init_device_mesh(world, test_device_type(), {1, 2}, {"a", "b"});
    EXPECT_THAT(error_of([&] { replicate(model, {.mesh = square}); }),
                AllOf(HasSubstr("found DeviceMesh("), HasSubstr("wanted a 1-d mesh")));
    EXPECT_THAT(error_of([&] { replicate(model, {.mesh = mesh, .bucket_bytes = 0}); }),
                HasSubstr("wanted positive sizes"));
    fully_shard(*sharded.layers[0], {.mesh = mesh});
    EXPECT_THAT(error_of([&] { replicate(sharded, {.mesh = mesh}); }), HasSubstr("Use one of the two"));
    replicate(*model.layers[0], {.mesh = mesh});
    EXPECT_THAT(error_of([&] { fully_shard(model, {.mesh = mesh}); }), HasSubstr("Use one of the two"));
    EXPECT_THAT(error_of([&] { set_prefetch(model, true); }), HasSubstr("Call fully_shard first"));
    EXPECT_THAT(error_of([&] { replicate_stats(model); }), HasSubstr("is not replicated"));
    EXPECT_THAT(error_of([&] { NoSync none(unfilled); }), HasSubstr("Call fully_shard or replicate first"));
    replicate(unfilled, {.mesh = mesh});
    EXPECT_THAT(error_of([&] { unfilled(tokens_of(0)); }), HasSubstr("embedding: still on the meta device"));
  });
}

}  // namespace
}  // namespace tessera::testing
