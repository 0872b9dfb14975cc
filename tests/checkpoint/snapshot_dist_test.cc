// Tests of the snapshots that the writer copies while training continues: the copies have the values at the time of
// save, or the save fails.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/snapshot_gate.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_dict.h"
#include "tests/parallel/small_model.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

CheckpointOptions deferred(const TempFolder& folder, const WorldPtr& world) {
  return {.folder = folder.path(), .world = world, .keep_last = 0, .defer_copy = true};
}

NamedTensors two_tensors(const WorldPtr& world) {
  const auto rows = at::arange(7 * 3, at::kFloat).view({7, 3});
  return {{"model.w", distribute_tensor(rows, line(world), {Shard(0)})}, {"model.v", at::full({5}, 2.0)}};
}

std::vector<at::Tensor> loaded(const Checkpoint& checkpoint) {
  const NamedTensors into = {{"model.w", at::zeros({7, 3})}, {"model.v", at::zeros({5})}};
  checkpoint.load(into);
  return {into[0].second, into[1].second};
}

TEST(Snapshot, HasTheValuesAtTheSave) {
  const TempFolder folder;
  on_threads(3, [&](const WorldPtr& world) {
    CheckpointWriter writer(deferred(folder, world));
    const auto tensors = two_tensors(world);
    for (int step = 1; step <= 4; ++step) {
      writer.save(step, tensors, {{"step", step}});
      writer.wait_for_snapshot();
      writer.wait_for_snapshot();  // a second wait has no effect
      for (const auto& [name, tensor] : tensors) tensor.mul_(2);
    }
    writer.finish();
    writer.wait_for_snapshot();  // no save has started
  });
  for (int step = 1; step <= 4; ++step) {
    const auto checkpoint = Checkpoint::open(folder / fmt::format("step-{:08}", step));
    checkpoint.verify();
    const double factor = 1 << (step - 1);
    EXPECT_TRUE(loaded(checkpoint)[0].equal(at::arange(21, at::kFloat).view({7, 3}) * factor)) << step;
    EXPECT_TRUE(loaded(checkpoint)[1].equal(at::full({5}, 2 * factor))) << step;
  }
}

TEST(Snapshot, ATensorChangedBeforeItsCopyFailsTheSaveOnAllRanks) {
  TESSERA_CPU_ONLY("a device copies in its streams' order, which save() has asked for");
  const TempFolder folder;
  on_threads(3, [&](const WorldPtr& world) {
    CheckpointWriter writer(deferred(folder, world));
    const auto tensors = two_tensors(world);
    writer.save(1, tensors, {});
    writer.finish();
    writer.save(2, tensors, {});
    if (world->rank() == 1) tensors[0].second.mul_(2);
    EXPECT_THAT(error_of([&] { writer.finish(); }), HasSubstr("rank 1: 'model.w': changed before its copy was taken"));
    writer.save(3, tensors, {});
    if (world->rank() == 2) to_local(tensors[0].second).add_(1);
    EXPECT_THAT(error_of([&] { writer.finish(); }), HasSubstr("rank 2: 'model.w': changed before its copy was taken"));
    writer.save(4, two_tensors(world), {});
    writer.finish();
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000002"));
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000003"));
  EXPECT_TRUE(loaded(*Checkpoint::latest(folder.path()))[0].equal(at::arange(21, at::kFloat).view({7, 3})));
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 4);
}

TEST(Snapshot, IsPublishedOnlyAfterEveryRankHasCheckedForChanges) {
  const TempFolder folder;
  on_threads(2, [&](const WorldPtr& world) {
    CheckpointWriter writer(deferred(folder, world));
    writer.save(1, two_tensors(world), {});
    if (world->rank() == 0) writer.wait_for_snapshot();
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    EXPECT_FALSE(std::filesystem::exists(folder / "LATEST"));
    comm::barrier(*world->group());
    writer.wait_for_snapshot();
    writer.finish();
    EXPECT_TRUE(std::filesystem::exists(folder / "LATEST"));
  });
}

TEST(Snapshot, AFailedSnapshotFailsTheSaveOnAllRanks) {
  const TempFolder folder;
  for (const bool defer : {false, true}) {
    on_threads(2, [&](const WorldPtr& world) {
      auto options = deferred(folder, world);
      options.defer_copy = defer;
      CheckpointWriter writer(options);
      auto tensors = two_tensors(world);
      writer.save(1, tensors, {});
      tensors.emplace_back("model.huge", at::ones({1}).expand({int64_t{1} << 50}));  // one rank copies it
      writer.save(2, tensors, {});
      writer.wait_for_snapshot();
      EXPECT_THAT(error_of([&] { writer.finish(); }), HasSubstr("not saved: rank "));
      writer.save(3, two_tensors(world), {});
      writer.finish();
    });
  }
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 3);
}

// Between save and wait a sharded model does a whole step. Forward and backward do not write to saved tensors.
NamedTensors training_tensors(SmallModel& model, optim::Optimizer& optimizer) {
  const auto [weights, states] = get_state_dict(model, {&optimizer}, {.flatten_optimizer_state_dict = true});
  NamedTensors out;
  for (const auto* dict : {&weights, &states}) {
    for (const auto& [key, value] : *dict) {
      if (value.is_tensor()) out.emplace_back(to_string(key), value.tensor());
    }
  }
  return out;
}

TEST(Snapshot, StaysValidUntilTheOptimizerStepOfAShardedModel) {
  const TempFolder folder;
  on_threads(2, [&](const WorldPtr& world) {
    CheckpointWriter writer(deferred(folder, world));
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      SmallModel model(3, dtype);
      shard(model, {.mesh = line(world)});
      const auto optimizer = optim::make_adamw(model, {.lr = 1e-2});
      const auto forward_and_backward = [&](int64_t step) { rank_backward(model, *world, step); };
      forward_and_backward(0);
      optimizer->step();
      optimizer->zero_grad();
      const auto saved = training_tensors(model, *optimizer);
      std::vector<at::Tensor> before;
      for (const auto& [name, tensor] : saved) before.push_back(whole(tensor).clone());

      writer.save(1, saved, {});
      forward_and_backward(1);
      writer.wait_for_snapshot();
      optimizer->step();
      writer.finish();
      const auto checkpoint = Checkpoint::latest(folder.path());
      for (size_t i = 0; i < saved.size(); ++i) {
        const auto found = at::zeros_like(before[i]);
        checkpoint->load({{saved[i].first, found}});
        EXPECT_TRUE(found.equal(before[i])) << saved[i].first;
      }

      if (on_accelerator()) continue;  // accelerators copy in the order of their streams
      writer.save(2, training_tensors(model, *optimizer), {});
      forward_and_backward(2);
      optimizer->step();
      EXPECT_THAT(error_of([&] { writer.wait_for_snapshot(), writer.finish(); }), HasSubstr("changed before"));
    }
  });
}

TEST(SnapshotGate, WaitsForTheCopyAndDetectsChangesThroughAnyView) {
  const auto base = at::zeros({4});
  for (const bool change : {false, true}) {
    SnapshotGate gate({{"w", base.detach()}});
    std::thread writer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      gate.mark_copied();
    });
    if (change) base.narrow(0, 1, 2).add_(1);
    gate.wait_and_check();
    writer.join();
    EXPECT_EQ(gate.wait_for_check().empty(), !change);
  }
}

}  // namespace
}  // namespace tessera::testing
