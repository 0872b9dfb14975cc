#include "tessera/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::TempFolder;

at::Tensor full_weight() { return at::arange(7 * 3, at::kFloat).view({7, 3}); }

NamedTensors sharded(const std::shared_ptr<comm::World>& world, double scale) {
  const auto mesh = init_device_mesh(world, "cpu", {world->size()});
  return {{"weight", distribute_tensor(full_weight() * scale, mesh, {Shard(0)})},
          {"bias", distribute_tensor(at::ones({3}) * scale, mesh, {Replicate()})},
          {"step", at::full({}, scale)}};
}

void save(const std::filesystem::path& folder, int ranks, bool async, int64_t step = 5, double scale = 1) {
  comm::run_thread_ranks(ranks, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder, .world = world, .keep_last = 2, .async = async});
    writer.save(step, sharded(world, scale), {{"data", 11}});
    writer.finish();
  });
}

TEST(Checkpoint, SavedOnAnyWorldSizeLoadsOnAnyOther) {
  for (const int writers : {1, 2, 4}) {
    TempFolder folder;
    save(folder.path(), writers, writers == 2);
    for (const int readers : {1, 3}) {
      comm::run_thread_ranks(readers, [&](const std::shared_ptr<comm::World>& world) {
        auto into = sharded(world, 0);
        const auto checkpoint = Checkpoint::latest(folder.path());
        ASSERT_TRUE(checkpoint);
        checkpoint->verify();
        checkpoint->load(into);
        EXPECT_EQ(checkpoint->step(), 5);
        EXPECT_EQ(checkpoint->extra().at("data"), 11);
        EXPECT_TRUE(at::equal(full_tensor(into[0].second), full_weight())) << writers << " to " << readers;
        EXPECT_TRUE(at::equal(full_tensor(into[1].second), at::ones({3})));
        EXPECT_EQ(into[2].second.item<double>(), 1);
      });
    }
  }
}

TEST(Checkpoint, KeepsTheNewestAndNamesItInLatest) {
  TempFolder folder;
  comm::run_thread_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world, .keep_last = 2, .keep_best = 1});
    const double losses[] = {3, 1, 2, 2, 2};
    for (int64_t step = 1; step <= 5; ++step) writer.save(step, sharded(world, 1), {}, losses[step - 1]);
    writer.finish();
  });
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"LATEST", "step-00000002", "step-00000004", "step-00000005"}));
  EXPECT_EQ(read_file(folder / "LATEST"), "step-00000005\n");
}

TEST(Checkpoint, OtherShapeOrMissingTensorIsFoundBeforeAnythingChanges) {
  TempFolder folder;
  save(folder.path(), 1, false);
  const auto checkpoint = Checkpoint::latest(folder.path());
  auto untouched = at::zeros({3});
  EXPECT_THROW(checkpoint->load({{"bias", untouched}, {"weight", at::zeros({7, 4})}}), Error);
  EXPECT_THROW(checkpoint->load({{"bias", untouched}, {"other", at::zeros({1})}}), Error);
  EXPECT_THROW(checkpoint->load({{"bias", at::zeros({3}, at::kDouble)}}), Error);
  EXPECT_TRUE(at::equal(untouched, at::zeros({3})));
}

TEST(Checkpoint, DamageIsNamed) {
  TempFolder folder;
  save(folder.path(), 2, false);
  const auto file = folder / "step-00000005" / "rank-00001-of-00002.safetensors";
  auto bytes = read_file(file);
  bytes.back() ^= 1;
  publish_file(file, bytes);
  EXPECT_THROW(Checkpoint::latest(folder.path())->verify(), Error);
  publish_file(file, bytes.substr(0, bytes.size() - 1));
  EXPECT_THROW(Checkpoint::latest(folder.path()), Error);
  publish_file(folder / "step-00000005" / "manifest.json", "{\"format\": 3}");
  EXPECT_THROW(Checkpoint::latest(folder.path()), Error);
}

TEST(Checkpoint, FailedSaveLeavesTheOlderCheckpointAndNothingHalfWritten) {
  TempFolder folder;
  save(folder.path(), 2, false);
  comm::run_thread_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world, .async = false});
    auto tensors = sharded(world, 2);
    tensors.emplace_back(std::string(1 << 10, 'x'), at::ones({1}, at::kComplexFloat));  // no safetensors dtype
    EXPECT_THROW(writer.save(6, tensors, {}), Error);
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000006"));
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000006.tmp"));
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 5);
}

TEST(Checkpoint, AFailedSaveIsKnownBeforeTheNextOne) {
  TempFolder folder;
  comm::run_thread_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world, .async = true});
    writer.save(1, sharded(world, 1), {});
    auto tensors = sharded(world, 2);
    // Only rank 1 has something that cannot be written: a part of no safetensors dtype.
    const auto mesh = init_device_mesh(world, "cpu", {2});
    const auto part = at::ones({1}, world->rank() == 0 ? at::kFloat : at::kComplexFloat);
    tensors.emplace_back("odd", from_local(part, mesh, {Shard(0)}));
    EXPECT_FALSE(writer.failed());
    try {
      writer.save(2, tensors, {});
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      return;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!writer.failed() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_TRUE(writer.failed());
    try {
      writer.finish();
      ADD_FAILURE() << "no error on rank " << world->rank();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("not saved: rank"), std::string::npos) << error.what();
    }
    EXPECT_FALSE(writer.failed());
    writer.save(3, sharded(world, 3), {});
    writer.finish();
  });
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 3);
}

TEST(Checkpoint, TwoWritersOfOneWorldKeepApart) {
  TempFolder good, bad;
  comm::run_thread_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter first({.folder = good.path(), .world = world, .async = true});
    CheckpointWriter second({.folder = bad.path(), .world = world, .async = true});
    first.save(1, sharded(world, 1), {});
    first.finish();
    auto tensors = sharded(world, 2);
    tensors.emplace_back("odd", at::ones({1}, at::kComplexFloat));  // no safetensors dtype
    second.save(1, tensors, {});
    EXPECT_THROW(second.finish(), Error);  // not what the first one was told
    first.save(2, sharded(world, 2), {});
    second.save(2, sharded(world, 4), {});
    second.finish();
    first.finish();
  });
  for (const auto& [folder, scale] : {std::pair(&good, 2.0), std::pair(&bad, 4.0)}) {
    const auto checkpoint = Checkpoint::latest(folder->path());
    ASSERT_TRUE(checkpoint);
    EXPECT_EQ(checkpoint->step(), 2);
    auto weight = at::zeros({7, 3});
    checkpoint->load({{"weight", weight}});
    EXPECT_TRUE(at::equal(weight, full_weight() * scale));
  }
}

TEST(Checkpoint, NoLatestMeansNone) {
  TempFolder folder;
  EXPECT_FALSE(Checkpoint::latest(folder.path()));
}

}  // namespace
}  // namespace tessera
