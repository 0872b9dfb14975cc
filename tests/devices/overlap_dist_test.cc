// Tests which launches overlap on the pretend device: gathers and reductions of FSDP with computation, and copies of
// batches and checkpoints with both. Tests that the race detector finds a missing order between them.
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/mesh/device_stream.h"
#include "tessera/mesh/host_memory.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel/comm_streams.h"
#include "tests/devices/overlap.h"
#include "tests/parallel/small_model.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {
using pretend::Launch;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

at::TensorOptions on(int device) { return at::TensorOptions(at::kFloat).device(pretend_device(device)); }

// A sharded model of three layers after its first steps, and its next forward and backward.
struct Sharded {
  MeshPtr mesh;
  SmallModel model;
  std::unique_ptr<optim::Optimizer> optimizer;
  at::Tensor rows, loss;
  const int device;

  Sharded(const WorldPtr& world, MeshPtr over, const FullyShardOptions& options = {})
      : mesh(std::move(over)), device(world->rank()) {
    auto all = options;
    all.mesh = mesh;
    shard(model, all);
    optimizer = optim::make_adamw(model, {.lr = 1e-2});
    rows = rows_of_rank(tokens_of(0), world->rank(), world->size()).to(mesh->device());
    for (int step = 0; step < 2; ++step) forward(), backward(), update();
  }
  std::vector<Launch> forward() {
    return launches_during(device, [&] { loss = loss_sum(model(rows), rows); });
  }
  std::vector<Launch> backward() {
    return launches_during(device, [&] { loss.backward(); });
  }
  void update() {
    optimizer->step();
    optimizer->zero_grad();
  }
};

TEST_F(PretendOverlap, AllGathersOverlapComputation) {
  on_threads(2, [](const WorldPtr& world) {
    Sharded each(world, line_on_device(world), {.mp_policy = {.param_dtype = at::kBFloat16}});
    for (const bool ahead : {true, false}) {
      set_prefetch(each.model, ahead);
      each.forward(), each.backward(), each.update();  // this step records the order
      const auto forward = each.forward();
      const auto gathers = named(forward, "allgather"), layers = named(forward, "gelu");
      ASSERT_THAT(gathers, SizeIs(4));  // the root and three layers
      ASSERT_THAT(layers, SizeIs(3));
      EXPECT_TRUE(layers[1].comes_behind(gathers[2]));
      EXPECT_FALSE(gathers[2].comes_behind(layers[0])) << "ahead " << ahead;
      EXPECT_FALSE(gathers[3].comes_behind(layers[ahead ? 0 : 1])) << "ahead " << ahead;
      EXPECT_TRUE(gathers[3].comes_behind(gathers[2]));  // they share a communicator

      const auto backward = each.backward();
      const auto again = named(backward, "allgather"), reductions = named(backward, "reduce_scatter"),
                 steps = named(backward, "gelu_backward");
      ASSERT_THAT(again, SizeIs(3));
      ASSERT_THAT(reductions, SizeIs(4));
      ASSERT_THAT(steps, SizeIs(3));
      EXPECT_TRUE(reductions[0].comes_behind(steps[0]));
      EXPECT_FALSE(again[2].comes_behind(reductions[0])) << "ahead " << ahead;
      EXPECT_FALSE(again[2].comes_behind(steps[ahead ? 0 : 1])) << "ahead " << ahead;
      EXPECT_FALSE(steps[1].comes_behind(reductions[0])) << "ahead " << ahead;
      EXPECT_TRUE(reductions[3].comes_behind(reductions[2]));
      each.update();
    }
  });
}

TEST_F(PretendOverlap, AllReducesOverReplicasWaitForTheirReduceScatterOnly) {
  on_threads(4, [](const WorldPtr& world) {
    Sharded each(world, init_device_mesh(world, "pretend", {2, 2}, {"replicate", "shard"}));
    each.forward();
    expect_all_reduces_wait_for_their_reduce_scatter_only(each.backward());
    each.update();
  });
}

TEST_F(PretendOverlap, CopiesOfOffloadedShardsAndGradientsOverlapComputation) {
  on_threads(2, [](const WorldPtr& world) {
    Sharded each(world, line_on_device(world), {.cpu_offload = true});
    const auto forward = each.forward();
    const auto copies = named(forward, "copy to device"), layers = named(forward, "gelu");
    ASSERT_THAT(copies, SizeIs(4));
    EXPECT_FALSE(copies[3].comes_behind(layers[0]));
    pretend::take_sync_names(world->rank());
    const auto backward = each.backward();
    const auto back = named(backward, "copy to host"), steps = named(backward, "gelu_backward");
    ASSERT_THAT(back, SizeIs(4));
    EXPECT_TRUE(back[0].comes_behind(named(backward, "reduce_scatter")[0]));
    EXPECT_FALSE(back[0].comes_behind(steps[1]));
    // The host waits after all launches, at the end of backward, once for each group.
    EXPECT_EQ(pretend::take_sync_names(world->rank()).size(), 4U);
    each.update();
  });
}

// With twice as many layers the peak must not grow by a byte: gathers in flight have two buffers, and so have shards
// that are copied from the host.
TEST_F(PretendOverlap, BuffersInFlightAreBounded) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool offload : {false, true}) {
      std::vector<int64_t> most;
      for (const int layers : {4, 8}) {
        SmallModel model(layers);
        shard(model,
              {.mesh = line_on_device(world), .mp_policy = {.param_dtype = at::kBFloat16}, .cpu_offload = offload});
        const at::NoGradGuard no_grad;
        const auto rows = rows_of_rank(tokens_of(0), world->rank(), world->size()).to(pretend_device(world->rank()));
        for (int step = 0; step < 2; ++step) model(rows);
        most.push_back(peak_of(world->rank(), [&] { model(rows); }));
      }
      EXPECT_EQ(most[0], most[1]) << "offload " << offload;
    }
  });
}

// Whole steps are measured. Offloaded gradients leave the device as they are computed, so that more layers need no more
// memory for them.
TEST_F(PretendOverlap, BuffersOfOffloadedGradientsAreBounded) {
  on_threads(2, [](const WorldPtr& world) {
    std::vector<int64_t> most;
    for (const int layers : {4, 8}) {
      WideLayers model(layers);
      const FullyShardOptions options = {.mesh = line_on_device(world), .cpu_offload = true};
      for (auto& layer : model.layers) fully_shard(*layer, options);
      fully_shard(model, options);
      const auto optimizer = optim::make_adamw(model, {.lr = 1e-2});
      const auto rows = at::ones({4, WideLayers::kWidth}).to(pretend_device(world->rank()));
      const auto step = [&] {
        model(rows).sum().backward();
        optimizer->step();
        optimizer->zero_grad();
      };
      for (int count = 0; count < 2; ++count) step();
      most.push_back(peak_of(world->rank(), step, WideLayers::kNoise));
    }
    const int64_t activations = 4 * 2 * 4 * WideLayers::kHidden * 4;  // inputs and results of gelu, 4 layers, 4 rows
    EXPECT_LE(most[1] - most[0], activations + WideLayers::kNoise);
    EXPECT_LT(activations + WideLayers::kNoise, WideLayers::kLayerNumel * 4) << "less than a layer's gradients";
  });
}

TEST_F(PretendOverlap, CheckpointCopiesOverlapComputation) {
  const TempFolder folder;
  on_threads(2, [&](const WorldPtr& world) {
    Sharded each(world, line_on_device(world));
    NamedTensors tensors;
    for (const auto& named : each.model.named_parameters()) {
      tensors.emplace_back("model." + named.name, named.slot->parameter);
    }
    CheckpointWriter writer({.folder = folder / "saves", .world = world, .defer_copy = true});
    const auto wanted = whole_parameters(each.model);
    const auto pageable = pretend::counters(world->rank()).pageable_copies;
    pretend::take_sync_names(world->rank());
    const auto copies = launches_during(world->rank(), [&] { writer.save(1, tensors, {}); });
    const auto sent = named(copies, "copy to host");
    EXPECT_THAT(sent, SizeIs(tensors.size()));
    EXPECT_NE(sent[0].stream, 0);
    each.forward(), each.backward();
    // The thread that writes the checkpoint waits for one event. The thread that calls save() waits for nothing.
    EXPECT_THAT(pretend::take_sync_names(world->rank()), ::testing::Each("synchronizeEvent"));
    writer.wait_for_snapshot();
    const auto update = launches_during(world->rank(), [&] { each.update(); });
    EXPECT_TRUE(update.front().comes_behind(sent.back()));
    writer.finish();
    EXPECT_EQ(pretend::counters(world->rank()).pageable_copies, pageable);
    NamedTensors loaded;
    SmallModel other;
    shard(other, {.mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"})});
    for (const auto& named : other.named_parameters()) {
      loaded.emplace_back("model." + named.name, named.slot->parameter);
    }
    Checkpoint::latest(folder / "saves")->load(loaded);
    const auto found = whole_parameters(other);
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(found[i], wanted[i].cpu())) << i;
  });
}

// With the setting split_groups of recipes, the second group of the ranks that gather is split from the communicator of
// the first group.
TEST_F(PretendOverlap, GroupsFollowTheSettings) {
  for (const bool on : {true, false}) {
    comm::set_device_backend_settings({.high_priority_streams = on, .split_groups = on});
    const auto before = pretend::groups_split();
    on_threads(2, [&](const WorldPtr& world) {
      Sharded each(world, line_on_device(world));
      const auto gathers = named(each.forward(), "allgather");
      EXPECT_EQ(gathers.at(0).stream >= pretend::kFirstOfHighPriority, on);
      each.backward(), each.update();
    });
    EXPECT_EQ(pretend::groups_split() - before, on ? 2 : 0);
  }
  comm::set_device_backend_settings({});
}

// For a mesh of all ranks, the groups of both dims, rows and columns, are split at once. For a mesh of some ranks, the
// groups are made when they are used.
TEST_F(PretendOverlap, MeshGroupsAreSplitFromTheWorldGroup) {
  for (const bool on : {true, false}) {
    comm::set_device_backend_settings({.high_priority_streams = false, .split_groups = on});
    const auto before = pretend::groups_split();
    on_threads(4, [&](const WorldPtr& world) {
      const auto mesh = init_device_mesh(world, "pretend", {2, 2}, {"dp", "tp"});
      const int rank = world->rank();
      const auto sum_over = [&](const std::string& dim) {
        const at::Tensor sum = at::full({1}, rank, at::TensorOptions(at::kFloat).device(mesh->device()));
        comm::all_reduce(*mesh->group(dim), sum).wait();
        return sum.cpu().item<float>();
      };
      EXPECT_EQ(sum_over("tp"), rank < 2 ? 1 : 5);
      EXPECT_EQ(sum_over("dp"), rank % 2 == 0 ? 2 : 4);
      if (rank == 3) return;
      EXPECT_EQ(init_device_mesh(world, "pretend", {1, 3}, {"a", "b"})->group("b")->size(), 3);
    });
    EXPECT_EQ(pretend::groups_split() - before, on ? 8 : 0);
  }
  comm::set_device_backend_settings({});
}

// ---- deliberate errors, each compared with the correct code ----

// Gathers as FsdpParamGroup does: cast on the gather stream, read by the compute stream.
void gather_once(CommStreams& streams, const at::Tensor& shard, bool follows, bool holds, bool retires) {
  if (follows) streams.gather.wait_current_stream();
  at::Tensor gathered;
  {
    const auto beside = streams.gather.make_current();
    gathered = shard.to(at::kBFloat16);
  }
  if (holds) streams.gather.block_current_stream();
  at::Tensor whole = gathered.to(at::kFloat);
  if (retires) streams.retire({std::exchange(gathered, {})});
}

TEST_F(PretendOverlap, MissingWaitIsDetected) {
  CommStreams streams(pretend_device());
  const at::Tensor shard = at::arange(100, on(0));
  gather_once(streams, shard, true, true, true);
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
  at::Tensor(shard).add_(1);  // as the optimizer does
  EXPECT_THAT(error_of([&] { gather_once(streams, shard, false, true, true); }), HasSubstr("nothing orders the two"));
  EXPECT_THAT(error_of([&] { gather_once(streams, shard, true, false, true); }), HasSubstr("nothing orders the two"));
  streams.gather.block_current_stream();
  pretend::take_faults();
}

TEST_F(PretendOverlap, BufferFreedTooEarlyIsDetected) {
  CommStreams streams(pretend_device());
  const at::Tensor shard = at::arange(100, on(0));
  for (int step = 0; step < 3; ++step) gather_once(streams, shard, true, true, true);
  streams.free_retired();
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
  gather_once(streams, shard, true, true, false);
  EXPECT_THAT(pretend::take_faults(), ::testing::ElementsAre(HasSubstr("Call record_stream, or let stream")));
}

// Two copies use one buffer in turn, like a pinned or double buffer.
TEST_F(PretendOverlap, BufferReusedTooEarlyIsDetected) {
  const DeviceStream copies(pretend_device());
  const at::Tensor first = pinned_empty(100, at::kFloat, pretend_device()), buffer = at::zeros({100}, on(0));
  first.fill_(1);
  for (const bool waits : {true, false}) {
    copies.wait_current_stream();
    {
      const auto entered = copies.make_current();
      buffer.copy_(first, /*non_blocking=*/true);
    }
    copies.block_current_stream();
    const at::Tensor read = buffer * 2;
    if (waits) copies.wait_event(DeviceEvent::record_on_current(pretend_device()));
    const auto again = [&] {
      const auto entered = copies.make_current();
      buffer.copy_(first, /*non_blocking=*/true);
    };
    if (waits) {
      again();
    } else {
      EXPECT_THAT(error_of(again), HasSubstr("nothing orders the two"));
    }
    copies.block_current_stream();
    // The same error on the host: pinned memory is written to during a copy from it.
    if (!waits) first.fill_(2);
    copies.record_event().wait();
    EXPECT_THAT(pretend::take_faults(), SizeIs(waits ? 0 : 1));
  }
}

}  // namespace
}  // namespace tessera::testing
