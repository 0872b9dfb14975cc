// Tests of checkpoints whose ranks hold different shards for different reasons: FSDP over tensor parallel, strided
// shards, replicas on some of the ranks, and pipeline stages.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::test_device_type;

using WorldOfRanks = std::shared_ptr<comm::World>;

at::Tensor numbered(at::IntArrayRef shape, double first) {
  return at::arange(c10::multiply_integers(shape), at::kDouble).add(first).view(shape);
}

// Tensors of a mesh (dp, tp): FSDP over tensor parallel, shards of shards, tensors that tensor parallel does not shard,
// and plain tensors.
NamedTensors spread_over(const MeshPtr& mesh, double factor) {
  const auto dp = mesh->slice({"dp"});
  const auto tp = mesh->slice({"tp"});
  const auto tp_size = mesh->size(1);
  const auto lay = [&](at::IntArrayRef shape, double first, const MeshPtr& on, const Placements& how) {
    return distribute_tensor(numbered(shape, first) * factor, on, how, std::nullopt);
  };
  return {{"fsdp_over_tp", lay({7, 3}, 1, mesh, {StridedShard(0, tp_size), Shard(0)})},
          {"pieces", lay({11, 2}, 100, dp, {StridedShard(0, 3)})},
          {"pieces_of_both_dims", lay({6, 10}, 200, mesh, {StridedShard(0, 3), StridedShard(1, 2)})},
          {"columns", lay({3, 5}, 300, mesh, {Replicate(), Shard(1)})},
          {"dp_alone", lay({5}, 400, dp, {Shard(0)})},
          {"tp_alone", lay({5}, 500, tp, {Shard(0)})},
          {"scalar", lay({}, 600, mesh, {Replicate(), Replicate()})},
          {"nothing", lay({0, 4}, 0, mesh, {Shard(0), Shard(1)})},
          {"plain", numbered({3}, 700) * factor}};
}

// World size, and the number of ranks along dp.
constexpr std::pair<int, int> kLayouts[] = {{1, 1}, {2, 1}, {2, 2}, {3, 3}, {4, 1}, {4, 2}, {4, 4}};

TEST(CheckpointShards, EachElementIsWrittenOnceAndLoadsIntoEveryLayout) {
  for (const auto& [writers, writers_dp] : kLayouts) {
    const testing::TempFolder folder;
    testing::run_ranks({.size = writers}, [&, ranks = writers, dp = writers_dp](const WorldOfRanks& world) {
      CheckpointWriter writer({.folder = folder.path(), .world = world});
      writer.save(1, spread_over(init_device_mesh(world, test_device_type(), {dp, ranks / dp}, {"dp", "tp"}), 1), {});
      writer.finish();
    });
    const auto saved = DcpFolder::open(folder / "step-00000001");  // opening checks that no chunk overlaps another
    if (writers == 4 && writers_dp == 2) {
      EXPECT_GT(saved->find_tensor("pieces")->chunks.size(), 2U) << "no rank holds several boxes: this shows little";
    }
    for (const auto& [ranks, dp] : kLayouts) {
      testing::run_ranks({.size = ranks}, [&, ranks = ranks, dp = dp](const WorldOfRanks& world) {
        const auto mesh = init_device_mesh(world, test_device_type(), {dp, ranks / dp}, {"dp", "tp"});
        const auto found = spread_over(mesh, 0), wanted = spread_over(mesh, 1);
        Checkpoint::latest(folder.path())->load(found);
        for (size_t i = 0; i < found.size(); ++i) {
          const auto local = [](const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; };
          EXPECT_TRUE(at::equal(local(found[i].second), local(wanted[i].second)))
              << found[i].first << " of " << writers_dp << " x " << writers / writers_dp << " on " << dp << " x "
              << ranks / dp;
        }
      });
    }
  }
}

// Every rank names these tensors, but only some of the ranks hold each: a tensor on two meshes, on one mesh with the
// lowest rank, on one mesh without the lowest rank.
TEST(CheckpointShards, OfSeveralSubmeshesTheOneWithTheLowestRankWrites) {
  const testing::TempFolder folder;
  const auto on_some = [](const WorldOfRanks& world, double factor) {
    const auto all = init_device_mesh(world, test_device_type(), {2, 2}, {"a", "b"});
    const auto first = make_device_mesh(world, test_device_type(), {0, 2}, {2}),
               last = make_device_mesh(world, test_device_type(), {3, 1}, {2});
    const auto lay = [&](double begin, const MeshPtr& mesh, const Placement& how) {
      return distribute_tensor(numbered({5, 2}, begin) * factor, mesh, {how}, std::nullopt);
    };
    return NamedTensors{{"of_each_half", lay(1, all->slice({"b"}), Shard(0))},
                        {"with_the_lowest", lay(100, first, Shard(0))},
                        {"without_it", lay(200, last, Shard(0))},
                        {"replicas_without_it", lay(300, last, Replicate())},
                        {"of_all", lay(400, all->slice({"a"}), Replicate())}};
  };
  testing::run_ranks({.size = 4}, [&](const WorldOfRanks& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world});
    writer.save(1, on_some(world, 1), {});
    writer.finish();
    const auto again = on_some(world, 0), wanted = on_some(world, 1);
    Checkpoint::latest(folder.path())->load(again);
    for (size_t i = 0; i < again.size(); ++i) {
      EXPECT_TRUE(at::equal(to_local(again[i].second), to_local(wanted[i].second))) << again[i].first;
    }
  });
  const auto saved = DcpFolder::open(folder / "step-00000001");  // opening checks that each element is written once
  for (const auto& [name, first] : {std::pair("of_each_half", 1), {"without_it", 200}, {"replicas_without_it", 300}}) {
    EXPECT_TRUE(at::equal(saved->tensor(name), numbered({5, 2}, first))) << name;
  }
}

std::vector<int> stage_of(int rank) { return {rank / 2 * 2, rank / 2 * 2 + 1}; }

// Two stages of two ranks each.
NamedTensors of_stage(const WorldOfRanks& world, double factor) {
  const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"pp", "dp"});
  const auto stage = mesh->local_rank(0);
  const auto name = [&](const char* what) { return fmt::format("stage{}.{}", stage, what); };
  const auto first = 50.0 * static_cast<double>(stage);
  return {{name("weight"), distribute_tensor(numbered({5, 2}, first) * factor, mesh->slice({"dp"}), {Shard(0)})},
          {name("plain"), numbered({3}, first + 20) * factor}};
}

TEST(CheckpointShards, PipelineStagesSaveTheirOwnTensors) {
  const testing::TempFolder folder;
  testing::run_ranks({.size = 4}, [&](const WorldOfRanks& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world, .stage_ranks = stage_of(world->rank())});
    writer.save(1, of_stage(world, 1), {});
    writer.finish();
    const auto again = of_stage(world, 0);
    Checkpoint::latest(folder.path())->load(again);
    EXPECT_TRUE(at::equal(full_tensor(again[0].second).cpu(), full_tensor(of_stage(world, 1)[0].second).cpu()));
  });
  for (const int stage : {0, 1}) {
    const auto weight = at::zeros({5, 2}, at::kDouble), plain = at::zeros({3}, at::kDouble);
    Checkpoint::latest(folder.path())
        ->load({{fmt::format("stage{}.weight", stage), weight}, {fmt::format("stage{}.plain", stage), plain}});
    EXPECT_TRUE(at::equal(weight, numbered({5, 2}, 50 * stage)));
    EXPECT_TRUE(at::equal(plain, numbered({3}, 50 * stage + 20)));
  }
}

// The message of the save, which fails on every rank.
std::string why_not_saved(const std::filesystem::path& folder,
                          const std::function<NamedTensors(const WorldOfRanks&)>& tensors) {
  std::string message;
  testing::run_ranks({.size = 4}, [&](const WorldOfRanks& world) {
    CheckpointWriter writer({.folder = folder, .world = world, .async = false});
    try {
      writer.save(1, tensors(world), {});
      ADD_FAILURE() << "it was saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kIo);
      if (world->rank() == 0) message = error.what();
    }
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  return message;
}

TEST(CheckpointShards, IncompleteOrInconsistentTensorsAreNotPublished) {
  const testing::TempFolder folder;
  // If all ranks are treated as one stage, no rank writes the second stage's tensor.
  const auto missing = why_not_saved(folder.path(), [](const auto& world) { return of_stage(world, 1); });
  EXPECT_NE(missing.find("'stage1.weight': no rank wrote any of it"), std::string::npos) << missing;
  const auto unlike = why_not_saved(folder.path(), [](const WorldOfRanks& world) {
    return NamedTensors{{"w", at::ones({world->rank() == 2 ? 8 : 4})}};
  });
  EXPECT_NE(unlike.find("w: Float [4] on one rank, Float [8] on another"), std::string::npos) << unlike;
}

}  // namespace
}  // namespace tessera
