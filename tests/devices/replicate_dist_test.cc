// Tests replicate on the pretend device: its buckets are packed, summed and divided in parallel with computation, and
// have the CPU's values.
#include "tessera/mesh/device_stream.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel/comm_streams.h"
#include "tessera/parallel/ddp/grad_bucket.h"
#include "tessera/parallel/ddp/replicate.h"
#include "tests/devices/overlap.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class PretendReplicate : public PretendOverlap {};

// The buckets are so small that SmallModel fills several.
ReplicateOptions buckets_on(const MeshPtr& mesh) {
  return {.mesh = mesh, .bucket_bytes = 500, .first_bucket_bytes = 100, .rebuild_buckets = false};
}

struct Replica {
  MeshPtr mesh;
  SmallModel model;
  std::unique_ptr<optim::Optimizer> optimizer;
  at::Tensor rows, loss;
  const int device;

  Replica(const WorldPtr& world, ReplicateOptions options) : mesh(options.mesh), device(world->rank()) {
    move_to(model, mesh->device());
    replicate(model, options);
    optimizer = optim::make_adamw(model, {.lr = 1e-2});
    rows = rows_of_rank(tokens_of(0), world->rank(), world->size()).to(mesh->device());
    for (int step = 0; step < 2; ++step) forward(), backward(), update();
  }
  void forward() { loss = loss_sum(model(rows), rows); }
  std::vector<pretend::Launch> backward() {
    return launches_during(device, [&] { loss.backward(); });
  }
  void update() {
    optimizer->step();
    optimizer->zero_grad();
  }
};

std::vector<pretend::Launch> on_stream(const std::vector<pretend::Launch>& launches, int stream) {
  std::vector<pretend::Launch> out;
  std::copy_if(launches.begin(), launches.end(), std::back_inserter(out),
               [&](const pretend::Launch& each) { return each.stream == stream; });
  return out;
}

TEST_F(PretendReplicate, PackingAllReduceAndDivisionOfBucketsOverlapComputation) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool casts : {false, true}) {
      auto options = buckets_on(line_on_device(world));
      if (casts) {  // half the bytes, so as many buckets
        options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
        options.bucket_bytes /= 2, options.first_bucket_bytes /= 2;
      }
      Replica each(world, options);
      each.forward();
      const auto backward = each.backward();
      const auto sums = named(backward, "allreduce"), steps = named(backward, "gelu_backward"),
                 divisions = named(backward, "aten::mul");
      ASSERT_THAT(sums, SizeIs(4));
      ASSERT_THAT(steps, SizeIs(3));
      ASSERT_THAT(divisions, SizeIs(4));
      // The copies into buckets run on a separate stream. The copies of the first bucket come before the sum of
      // the second.
      std::vector<pretend::Launch> packs;
      for (const auto& copy : named(backward, "copy")) {
        if (copy.stream != steps[0].stream && copy.stream != divisions[0].stream) packs.push_back(copy);
      }
      ASSERT_GE(packs.size(), 13U);  // one for each parameter
      for (const auto& pack : packs) EXPECT_EQ(pack.stream, packs[0].stream);
      EXPECT_TRUE(sums[0].comes_behind(packs[0]));
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_NE(divisions[i].stream, steps[0].stream);
        EXPECT_NE(divisions[i].stream, packs[0].stream);
        EXPECT_TRUE(divisions[i].comes_behind(sums[i]));
        if (i < 3) {
          EXPECT_FALSE(divisions[i].comes_behind(sums[i + 1]));
        }
      }
      // The first layer, whose backward is the last, waits for none of the sums.
      EXPECT_TRUE(sums[1].comes_behind(steps[0]));
      for (size_t i = 0; i < 4; ++i) EXPECT_FALSE(steps[2].comes_behind(sums[i])) << i;
      EXPECT_FALSE(divisions[0].comes_behind(steps[2]));
      const auto computing = on_stream(backward, steps[0].stream);
      for (const auto& launch : computing) EXPECT_FALSE(launch.comes_behind(divisions[3])) << launch.name;
      const auto update = launches_during(world->rank(), [&] { each.update(); });
      EXPECT_TRUE(update.front().comes_behind(divisions[3]));
    }
  });
}

TEST_F(PretendReplicate, StepsAllocateNoSegmentsAndDoNotSyncTheHost) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool half : {false, true}) {
      auto options = buckets_on(line_on_device(world));
      if (half) options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      Replica each(world, options);
      const auto step = [&] { each.forward(), each.backward(), each.update(); };
      step();
      const auto cost = cost_of(world->rank(), step);
      EXPECT_EQ(cost.host_syncs, 0);
      EXPECT_EQ(cost.segments, 0);
    }
  });
}

// When backward has reached the first layer, a deeper model keeps no more gradients outside of the buckets.
TEST_F(PretendReplicate, GradientsOutsideOfBucketsAreBounded) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line_on_device(world);
    const auto bytes = [&] { return pretend::counters(world->rank()).bytes; };
    std::vector<int64_t> beside;
    for (const int layers : {4, 8}) {
      WideLayers model(layers);
      move_to(model, mesh->device());
      replicate(model, buckets_on(mesh));
      int64_t held = 0;
      model.layers[0]->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
        inputs[0]->register_hook([&](const at::Tensor&) { held = bytes(); });
      });
      const auto rows = at::ones({4, WideLayers::kWidth}).to(mesh->device());
      for (int step = 0; step < 2; ++step) {
        const at::Tensor loss = model(rows).sum();
        loss.backward();
        if (step == 0) model.zero_grad();
      }
      beside.push_back(held - bytes());
    }
    EXPECT_LE(std::abs(beside[1] - beside[0]), WideLayers::kNoise);
    EXPECT_LE(beside[0], WideLayers::kLayerNumel * 4 + WideLayers::kNoise);
  });
}

// ---- values ----

struct Branches : nn::Callable<Branches> {
  std::shared_ptr<Layer> first, second, sometimes, never;
  bool uses = true;
  Branches() {
    Values values(4);
    first = register_module("first", std::make_shared<Layer>(values, 6, 10));
    second = register_module("second", std::make_shared<Layer>(values, 6, 10));
    sometimes = register_module("sometimes", std::make_shared<Layer>(values, 6, 10));
    never = register_module("never", std::make_shared<Layer>(values, 6, 10));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = (*second)((*first)(x));
    return uses ? (*sometimes)(y) : y;
  }
};

struct DdpWay {
  bool find_unused = false, static_graph = false, rebuild_buckets = false;
  bool all_use = true;   // all ranks use the optional layer
  uint64_t without = 0;  // bit i: backward i does not synchronise
  MixedPrecisionPolicy policy = {};
};

std::vector<at::Tensor> branches_trained(const WorldPtr& world, const std::string& device, const DdpWay& way) {
  const auto mesh = init_device_mesh(world, device, {world->size()}, {"dp"});
  Branches model;
  move_to(model, mesh->device());
  replicate(model, {.mesh = mesh,
                    .mp_policy = way.policy,
                    .bucket_bytes = 500,
                    .first_bucket_bytes = 100,
                    .find_unused_parameters = way.find_unused,
                    .static_graph = way.static_graph,
                    .rebuild_buckets = way.rebuild_buckets});
  model.uses = way.all_use || world->rank() == 0;
  const auto optimizer = optim::make_sgd(model, {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < 2; ++step) {
    for (uint64_t micro = 0; micro < 3; ++micro) {
      const auto seed = static_cast<uint64_t>(10 * step + world->rank()) + 100 * micro;
      set_requires_gradient_sync(model, (way.without >> micro & 1) == 0);
      model(Values(seed)({4, 6}).to(mesh->device())).sum().backward();
    }
    EXPECT_FALSE(model.never->parameters()[0].grad().defined());
    optimizer->step();
    if (step == 0) optimizer->zero_grad();
  }
  std::vector<at::Tensor> out;
  for (const auto& tensors : {whole_parameters(model), whole_gradients(model)}) {
    for (const auto& tensor : tensors) out.push_back(tensor.defined() ? tensor.cpu() : tensor);
  }
  return out;
}

TEST_F(PretendReplicate, UnusedParametersAndAccumulationEqualTheCpu) {
  for (const int size : {1, 2, 4}) {
    on_threads(size, [](const WorldPtr& world) {
      for (const auto& way :
           {DdpWay{}, DdpWay{.find_unused = true}, DdpWay{.static_graph = true}, DdpWay{.rebuild_buckets = true},
            DdpWay{.all_use = false}, DdpWay{.find_unused = true, .all_use = false}, DdpWay{.without = 3},
            DdpWay{.find_unused = true, .all_use = false, .without = 2}, DdpWay{.rebuild_buckets = true, .without = 1},
            DdpWay{.without = 1, .policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}},
            DdpWay{.without = 2, .policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kHalf}}}) {
        SCOPED_TRACE(::testing::Message() << world->size() << " ranks, unused " << way.find_unused << ", static "
                                          << way.static_graph << ", learns " << way.rebuild_buckets << ", all use "
                                          << way.all_use << ", without " << way.without);
        const double tolerance = way.policy.param_dtype ? 1e-2 : 1e-6;
        EXPECT_LT(distance(branches_trained(world, "pretend", way), branches_trained(world, "cpu", way)), tolerance);
      }
    });
  }
}

// After an exception in backward the gradients in flight are dropped, and the next step must be correct.
TEST_F(PretendReplicate, RecoversAfterAFailedBackward) {
  on_threads(2, [](const WorldPtr& world) {
    std::vector<at::Tensor> gradients[2];
    for (const bool fails : {false, true}) {
      SmallModel model;
      const auto mesh = line_on_device(world);
      move_to(model, mesh->device());
      replicate(model, buckets_on(mesh));
      const auto rows = rows_of_rank(tokens_of(0), world->rank(), world->size()).to(mesh->device());
      if (fails) {
        bool armed = true;
        const auto id = model.layers[1]->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
          inputs[0]->register_hook([&](const at::Tensor&) {
            if (armed) throw std::runtime_error("on purpose");
          });
        });
        const auto loss = loss_sum(model(rows), rows);
        EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("on purpose"));
        model.layers[1]->remove_hook(id);
        armed = false;
      }
      loss_sum(model(rows), rows).backward();
      for (const auto& gradient : whole_gradients(model)) gradients[fails].push_back(gradient.cpu());
    }
    EXPECT_TRUE(same_bits(gradients[0], gradients[1]));
  });
}

// ---- deliberate errors, each compared with the correct code ----

struct Mistake {
  bool follows = true;   // packing waits for the gradient
  bool releases = true;  // the compute stream waits for packing before the gradient is freed
};

// Packs and reduces a bucket of one parameter, as ReplicateState does.
std::string run_bucket(const std::shared_ptr<comm::Group>& group, c10::Device device, const Mistake& mistake) {
  const auto options = at::TensorOptions(at::kFloat).device(device);
  const auto streams = std::make_shared<CommStreams>(device);
  ReplicatedParam param{
      .name = "weight", .slots = {}, .parameter = at::ones({4, 4}, options), .compute_dtype = at::kFloat};
  GradBucket bucket({&param}, at::kFloat, std::make_shared<BufferPool>(), streams, nullptr, "one");
  const auto error = error_of([&] {
    at::Tensor gradient = bucket.prepare(0, at::ones({4, 4}, options) * 3);
    if (mistake.follows) streams->reduce.wait_current_stream();
    {
      const auto beside = streams->reduce.make_current();
      bucket.add(0, gradient);
    }
    if (mistake.releases) streams->reduce.block_current_stream();
    gradient.reset();
    bucket.start(group, 2);
    bucket.write_values();
    bucket.finish();
    EXPECT_EQ(param.parameter.grad().sum().item<float>(), 16 * 3.0F * static_cast<float>(group->size()) / 2);
  });
  streams->reduce.block_current_stream();
  streams->replicas.block_current_stream();
  bucket.drop();
  return error;
}

TEST_F(PretendReplicate, MissingWaitIsDetected) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line_on_device(world);
    EXPECT_EQ(run_bucket(mesh->group(0), mesh->device(), {}), "");
  });
  const auto mesh = init_device_mesh(comm::World::single(), "pretend", {1});
  EXPECT_EQ(run_bucket(mesh->group(0), mesh->device(), {}), "");
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
  EXPECT_THAT(run_bucket(mesh->group(0), mesh->device(), {.follows = false}), HasSubstr("nothing orders the two"));
  pretend::take_faults();
  run_bucket(mesh->group(0), mesh->device(), {.releases = false});
  EXPECT_THAT(pretend::take_faults(), ::testing::ElementsAre(HasSubstr("Call record_stream, or let stream")));
}

}  // namespace
}  // namespace tessera::testing
