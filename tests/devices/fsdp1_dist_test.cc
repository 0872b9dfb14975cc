// Tests wrap_fsdp1 on the pretend device: values against the CPU's, the overlap of gathers and reductions with
// computation, and the cost of a step.
#include "tessera/mesh/device_stream.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel/comm_streams.h"
#include "tessera/parallel/data_parallel/reduction_stages.h"
#include "tessera/parallel/fsdp/sharding_state.h"
#include "tessera/parallel/fsdp/unsharded_storage.h"
#include "tests/devices/overlap.h"
#include "tests/fsdp1/fsdp1_model.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class PretendFsdp1 : public PretendOverlap {};

struct Fsdp1Way {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  bool use_orig_params = false;
  MixedPrecision precision = {};
  int replicas = 1;
};

Fsdp1Options options_of(const MeshPtr& mesh, const Fsdp1Way& way) {
  return {.group = mesh->group(mesh->ndim() - 1),
          .sharding_strategy = way.strategy,
          .use_orig_params = way.use_orig_params,
          .mixed_precision = way.precision,
          .replicate_group = way.replicas > 1 ? mesh->group(0) : nullptr};
}

MeshPtr mesh_of(const WorldPtr& world, const std::string& device, int replicas) {
  if (replicas == 1) return init_device_mesh(world, device, {world->size()}, {"dp"});
  return init_device_mesh(world, device, {replicas, world->size() / replicas}, {"replicate", "shard"});
}

// A wrapped model of three layers and the phases of its step.
struct Wrapped {
  MeshPtr mesh;
  SmallModel model;
  std::unique_ptr<optim::Optimizer> optimizer;
  at::Tensor rows, loss;
  const int device;

  Wrapped(const WorldPtr& world, const Fsdp1Way& way)
      : mesh(mesh_of(world, "pretend", way.replicas)), device(world->rank()) {
    move_to(model, mesh->device());
    wrap(model, options_of(mesh, way));
    optimizer = optim::make_adamw(model, {.lr = 1e-2, .weight_decay = 0});
    rows = rows_of_rank(tokens_of(0), world->rank(), world->size()).to(mesh->device());
    for (int step = 0; step < 2; ++step) forward(), backward(), update();
  }
  std::vector<pretend::Launch> forward() {
    return launches_during(device, [&] { loss = loss_sum(model(rows), rows); });
  }
  std::vector<pretend::Launch> backward() {
    return launches_during(device, [&] { loss.backward(); });
  }
  void update() {
    optimizer->step();
    optimizer->zero_grad();
  }
  void set_prefetch(bool on) { sharding_states(model)[0]->schedule()->set_prefetch(on); }
};

const MixedPrecision kHalfWide = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

// ---- values ----

// Runs three steps of two micro-batches, of which the first does not synchronise.
NamedTensors trained(const WorldPtr& world, const std::string& device, const Fsdp1Way& way) {
  const auto mesh = mesh_of(world, device, way.replicas);
  SmallModel model;
  move_to(model, mesh->device());
  wrap(model, options_of(mesh, way));
  const auto optimizer = optim::make_adamw(model, {.lr = 1e-2, .weight_decay = 0});
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      const auto rows = rows_of_rank(tokens_of(2 * step + micro), world->rank(), world->size()).to(mesh->device());
      const at::Tensor loss = loss_sum(model(rows), rows) / 48.0;
      set_requires_gradient_sync(model, micro == 1);
      loss.backward();
    }
    optimizer->step();
    optimizer->zero_grad();
  }
  auto out = whole_values(model);
  for (auto& [name, value] : out) value = value.cpu();
  return out;
}

void expect_fsdp1_as_on_cpu(const WorldPtr& world, const Fsdp1Way& way) {
  SCOPED_TRACE(::testing::Message() << world->size() << " ranks, strategy " << static_cast<int>(way.strategy)
                                    << ", use_orig_params " << way.use_orig_params);
  const double tolerance = way.precision.param_dtype ? 3e-2 : 1e-5;
  EXPECT_LT(distance(trained(world, "pretend", way), trained(world, "cpu", way)), tolerance);
}

TEST_F(PretendFsdp1, EveryStrategyEqualsTheCpu) {
  for (const int size : {1, 2, 4}) {
    on_threads(size, [](const WorldPtr& world) {
      for (const auto strategy :
           {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
        for (const bool orig : {false, true}) {
          expect_fsdp1_as_on_cpu(world, {.strategy = strategy, .use_orig_params = orig});
          expect_fsdp1_as_on_cpu(world, {.strategy = strategy, .use_orig_params = orig, .precision = kHalfWide});
        }
      }
    });
  }
}

TEST_F(PretendFsdp1, HybridShardingEqualsTheCpu) {
  on_threads(4, [](const WorldPtr& world) {
    for (const int replicas : {2, 4}) {
      for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
        for (const bool orig : {false, true}) {
          expect_fsdp1_as_on_cpu(world, {.strategy = strategy, .use_orig_params = orig, .replicas = replicas});
        }
      }
    }
  });
}

// Some parameters are used on some ranks only, or on none; and one forward has no backward.
TEST_F(PretendFsdp1, UnusedParametersEqualTheCpu) {
  struct Choosing : nn::Callable<Choosing> {
    std::shared_ptr<Layer> first, second;
    at::Tensor shift, scale, idle;
    Choosing() {
      Values values(4);
      first = register_module("first", std::make_shared<Layer>(values, 6, 10));
      second = register_module("second", std::make_shared<Layer>(values, 6, 10));
      register_parameter("shift", shift, values({6}));
      register_parameter("scale", scale, values({6}));
      register_parameter("idle", idle, values({6}));
    }
    bool with_scale = true;
    at::Tensor forward(const at::Tensor& x) {
      const auto y = (*second)((*first)(x)) + shift;
      return with_scale ? y * scale : y;
    }
  };
  on_threads(2, [](const WorldPtr& world) {
    std::vector<NamedTensors> found;
    for (const char* device : {"cpu", "pretend"}) {
      const auto mesh = mesh_of(world, device, 1);
      Choosing model;
      move_to(model, mesh->device());
      for (nn::Module* each : {static_cast<nn::Module*>(model.first.get()),
                               static_cast<nn::Module*>(model.second.get()), static_cast<nn::Module*>(&model)}) {
        wrap_fsdp1(*each, options_of(mesh, {.use_orig_params = true}));
      }
      model.with_scale = world->rank() == 0;
      const auto x = Values(static_cast<uint64_t>(world->rank()))({4, 6}).to(mesh->device());
      for (int step = 0; step < 2; ++step) {
        model(x).sum().backward();
        model(x);  // its prefetched gathers are dropped
      }
      for (const auto& handle : flat_parameter_handles(model)) {
        const auto names = handle->parameter_names();
        for (size_t i = 0; i < names.size(); ++i) {
          if (names[i] == "idle") {
            EXPECT_FALSE(handle->parameters()[i].grad().defined());
          }
        }
      }
      found.push_back(whole_grads(model));
      for (auto& [name, value] : found.back()) value = value.cpu();
    }
    EXPECT_LT(distance(found[1], found[0]), 1e-6);
  });
}

// ---- overlap ----

TEST_F(PretendFsdp1, AllGathersAndReduceScattersOverlapComputation) {
  on_threads(2, [](const WorldPtr& world) {
    for (const auto& way : {Fsdp1Way{}, Fsdp1Way{.use_orig_params = true, .precision = kHalfWide}}) {
      Wrapped each(world, way);
      for (const bool ahead : {true, false}) {
        each.set_prefetch(ahead);
        each.forward(), each.backward(), each.update();  // this step records the order
        const auto forward = each.forward();
        const auto gathers = named(forward, "allgather"), layers = named(forward, "gelu");
        ASSERT_THAT(gathers, SizeIs(4));  // the root and three layers
        ASSERT_THAT(layers, SizeIs(3));
        EXPECT_NE(gathers[0].stream, layers[0].stream);
        EXPECT_TRUE(layers[1].comes_behind(gathers[2]));
        EXPECT_FALSE(gathers[2].comes_behind(layers[0])) << "ahead " << ahead;
        EXPECT_FALSE(gathers[3].comes_behind(layers[ahead ? 0 : 1])) << "ahead " << ahead;

        const auto backward = each.backward();
        const auto again = named(backward, "allgather"), reductions = named(backward, "reduce_scatter"),
                   steps = named(backward, "gelu_backward");
        ASSERT_THAT(again, SizeIs(3));
        ASSERT_THAT(reductions, SizeIs(4));
        ASSERT_THAT(steps, SizeIs(3));
        EXPECT_NE(reductions[0].stream, again[0].stream);  // separate communicators
        EXPECT_TRUE(reductions[0].comes_behind(steps[0]));
        EXPECT_FALSE(again[2].comes_behind(reductions[0])) << "ahead " << ahead;
        EXPECT_FALSE(again[2].comes_behind(steps[ahead ? 0 : 1])) << "ahead " << ahead;
        EXPECT_FALSE(steps[1].comes_behind(reductions[0])) << "ahead " << ahead;
        EXPECT_TRUE(reductions[3].comes_behind(reductions[2]));
        each.update();
      }
    }
  });
}

TEST_F(PretendFsdp1, PrefetchesByDefault) {
  on_threads(2, [](const WorldPtr& world) {
    Wrapped each(world, {});
    const auto forward = each.forward();
    // The host starts the gather of the second layer before it launches the first layer.
    const auto first_layer =
        std::ranges::find_if(forward, [](const auto& launch) { return launch.name.find("gelu") != std::string::npos; });
    EXPECT_THAT(named({forward.begin(), first_layer}, "allgather"), SizeIs(3));
    each.backward(), each.update();
  });
}

TEST_F(PretendFsdp1, AllReducesOverReplicasWaitForTheirReduceScatterOnly) {
  on_threads(4, [](const WorldPtr& world) {
    Wrapped each(world, {.strategy = ShardingStrategy::kHybridShard, .replicas = 2});
    each.forward();
    expect_all_reduces_wait_for_their_reduce_scatter_only(each.backward());
    each.update();
  });
}

// Without sharding there are only casts, and all-reduces of full gradients.
TEST_F(PretendFsdp1, CastsAndAllReducesWithoutShardingOverlapComputation) {
  on_threads(2, [](const WorldPtr& world) {
    Wrapped each(world, {.strategy = ShardingStrategy::kNoShard, .precision = kHalfWide});
    const auto forward = each.forward();
    const auto layers = named(forward, "gelu");
    std::vector<pretend::Launch> casts;
    for (const auto& copy : named(forward, "copy")) {
      if (copy.stream != layers[0].stream) casts.push_back(copy);
    }
    ASSERT_THAT(casts, SizeIs(4));
    EXPECT_TRUE(layers[1].comes_behind(casts[2]));
    EXPECT_FALSE(casts[2].comes_behind(layers[0]));
    const auto backward = each.backward();
    const auto sums = named(backward, "allreduce"), steps = named(backward, "gelu_backward");
    ASSERT_THAT(sums, SizeIs(4));
    ASSERT_THAT(steps, SizeIs(3));
    EXPECT_TRUE(sums[0].comes_behind(steps[0]));
    EXPECT_FALSE(steps[1].comes_behind(sums[0]));
    EXPECT_FALSE(steps[2].comes_behind(sums[1]));
    each.update();
  });
}

// ---- cost of a step ----

// With twice as many layers the peak must not grow by a layer: three layers have buffers at a time.
TEST_F(PretendFsdp1, BuffersInFlightAreBounded) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = mesh_of(world, "pretend", 1);
    std::vector<int64_t> most;
    for (const int layers : {4, 8}) {
      WideLayers model(layers);
      move_to(model, mesh->device());
      for (auto& layer : model.layers) wrap_fsdp1(*layer, options_of(mesh, {.precision = kHalfWide}));
      wrap_fsdp1(model, options_of(mesh, {.precision = kHalfWide}));
      const at::NoGradGuard no_grad;
      const auto rows = at::ones({4, WideLayers::kWidth}).to(mesh->device());
      for (int step = 0; step < 2; ++step) model(rows);
      most.push_back(peak_of(
          world->rank(), [&] { model(rows); }, WideLayers::kNoise));
    }
    const int64_t whole = WideLayers::kLayerNumel * 2;  // bytes of a layer in bfloat16
    EXPECT_LE(std::abs(most[1] - most[0]), WideLayers::kNoise);
    EXPECT_GE(most[0], 2 * whole);
    EXPECT_LE(most[0], 3 * whole + WideLayers::kNoise);
  });
}

TEST_F(PretendFsdp1, StepsAllocateNoSegmentsAndDoNotSyncTheHost) {
  on_threads(4, [](const WorldPtr& world) {
    for (const bool orig : {false, true}) {
      for (const auto& way :
           {Fsdp1Way{.use_orig_params = orig}, Fsdp1Way{.use_orig_params = orig, .precision = kHalfWide},
            Fsdp1Way{ShardingStrategy::kShardGradOp, orig}, Fsdp1Way{ShardingStrategy::kNoShard, orig},
            Fsdp1Way{ShardingStrategy::kHybridShard, orig, {}, 2}}) {
        Wrapped each(world, way);
        const auto step = [&] { each.forward(), each.backward(), each.update(); };
        step();
        pretend::take_sync_names(world->rank());
        const auto cost = cost_of(world->rank(), step);
        EXPECT_EQ(cost.host_syncs, 0) << ::testing::PrintToString(pretend::take_sync_names(world->rank()));
        EXPECT_EQ(cost.segments, 0) << static_cast<int>(way.strategy) << orig;
        EXPECT_EQ(cost.pageable_copies, 0);
      }
    }
  });
}

// ---- deliberate errors, each compared with the correct code ----

// Gathers as FlatParamGroup does: into memory of the gather stream, at the place of the unsharded parameters.
void gather_in_place(CommStreams& streams, const at::Tensor& shard, bool follows, bool holds, bool retires) {
  BufferPool pool;
  UnshardedStorage whole(shard.device());
  if (follows) streams.gather.wait_current_stream();
  {
    const auto beside = streams.gather.make_current();
    whole.fill(pool, static_cast<int64_t>(shard.nbytes()));
    whole.tensor(0, shard.sizes(), at::kFloat).copy_(shard);
  }
  if (holds) streams.gather.block_current_stream();
  whole.tensor(0, shard.sizes(), at::kFloat).add(1);
  auto memory = whole.free("freed");
  if (retires) streams.retire(std::move(memory));
}

TEST_F(PretendFsdp1, ClippingSyncsTheHostOnce) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      Wrapped wrapped(world, {.use_orig_params = use_orig_params});
      wrapped.forward(), wrapped.backward();
      const auto before = pretend::counters(world->rank());
      EXPECT_GT(clip_grad_norm_(wrapped.model, 1e-3), 1e-3);
      const auto cost = pretend::counters(world->rank()) - before;
      EXPECT_EQ(cost.host_syncs, 1);
      EXPECT_LE(cost.launches, 4) << "norms, their stack, its copy, what clips";
    }
  });
}

TEST_F(PretendFsdp1, MissingWaitForAnAllGatherIsDetected) {
  CommStreams streams(pretend_device());
  const at::Tensor shard = at::arange(100, at::TensorOptions(at::kFloat).device(pretend_device()));
  for (int step = 0; step < 3; ++step) gather_in_place(streams, shard, true, true, true);
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
  at::Tensor(shard).add_(1);  // as the optimizer does
  EXPECT_THAT(error_of([&] { gather_in_place(streams, shard, false, true, true); }),
              HasSubstr("nothing orders the two"));
  EXPECT_THAT(error_of([&] { gather_in_place(streams, shard, true, false, true); }),
              HasSubstr("nothing orders the two"));
  streams.gather.block_current_stream();
  streams.free_retired();
  pretend::take_faults();
  gather_in_place(streams, shard, true, true, false);
  EXPECT_THAT(pretend::take_faults(), ::testing::ElementsAre(HasSubstr("Call record_stream, or let stream")));
}

// The compute stream reads a sum and must wait for another stream's event first.
TEST_F(PretendFsdp1, MissingWaitForAReductionIsDetected) {
  on_threads(2, [](const WorldPtr& world) {
    const auto group = mesh_of(world, "pretend", 1)->group(0);
    const auto streams = std::make_shared<CommStreams>(pretend_device(world->rank()));
    BufferPool pool;
    // Three routes: reduce-scatter and then all-reduce over replicas; all-reduce; all-reduce over replicas only.
    for (const auto& [route, other, total] :
         {std::tuple(ReductionRoute{.group = group, .replicas = group}, &streams->to_host, 16.0F),
          {{.group = group, .scatters = false}, &streams->replicas, 16.0F},
          {{.replicas = group}, &streams->reduce, 16.0F}}) {
      for (const bool waits : {true, false}) {
        ReductionStages stages;
        stages.set_streams(streams);
        const auto parts = at::ones({8}, at::TensorOptions(at::kFloat).device(pretend_device(world->rank())));
        stages.start(route, parts, pool, "sum");
        while (stages.advance("sum", true)) {
        }
        const at::Tensor sum = waits ? stages.take_result() : stages.take_result(*other);
        const auto read = [&] { EXPECT_EQ((sum * 1).sum().item<float>(), total); };
        if (waits) {
          read();
        } else {
          EXPECT_THAT(error_of(read), HasSubstr("nothing orders the two"));
        }
        other->block_current_stream();
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
