// Tests of the snapshot that a rank takes of its tensors, and of the plan of which rank writes which record.
#include "tessera/checkpoint/rank_snapshot.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

RankSnapshot snapshot_of(const NamedTensors& tensors, const NamedObjects& objects, int rank,
                         const std::vector<int>& holders) {
  SnapshotPool pool;
  auto snapshot = plan_snapshot(tensors, objects, WriterAssignment(rank, holders));
  DeviceCopies none;
  copy_snapshot(snapshot, pool, none);
  return snapshot;
}

// Contents of two ranks that report the same tensors.
CheckpointContents saved_by_two(const std::filesystem::path& folder, const NamedTensors& tensors,
                                const NamedObjects& objects = {}) {
  CheckpointContents contents;
  for (const int rank : {0, 1}) {
    add_report(contents, write_snapshot(snapshot_of(tensors, objects, rank, {0, 1}), folder, rank));
  }
  contents.metadata.check("test");
  publish_file(folder / ".metadata", contents.metadata.dump());
  return contents;
}

TEST(RankSnapshot, EachTensorIsWrittenByOneRankAndTheWorkIsBalanced) {
  const testing::TempFolder folder;
  const NamedTensors tensors = {{"w", at::rand({200, 30})},
                                {"v", at::rand({100, 60})},
                                {"scalar", at::ones({}, at::kDouble)},
                                {"empty", at::ones({0, 3})}};
  const auto contents = saved_by_two(folder.path(), tensors);
  ASSERT_EQ(contents.files.size(), 2U);
  for (const auto& file : contents.files) {
    EXPECT_EQ(file.xxh3, hash_file(folder / file.name));
    EXPECT_GT(file.size_bytes, 20'000U) << file.name;  // one of the two matrices is in each file
  }
  const auto saved = DcpFolder::open(folder.path());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(at::equal(saved->tensor(name), tensor)) << name;
  EXPECT_EQ(saved->find_tensor("scalar")->dtype, at::kDouble);
}

TEST(RankSnapshot, ChecksumsDetectChangedValuesWithoutAManifest) {
  const testing::TempFolder folder;
  saved_by_two(folder.path(), {{"model.w", at::full({10}, 3.0F)}, {"model.v", at::full({10}, 5.0F)}});
  EXPECT_EQ(DcpFolder::open(folder.path())->check_records(), 0U);
  auto bytes = read_file(folder / "__0_0.distcp");
  const float value = 3.0F;
  const auto at = bytes.find(std::string(reinterpret_cast<const char*>(&value), sizeof value));
  ASSERT_NE(at, bytes.npos);
  bytes[at] ^= 1;
  publish_file(folder / "__0_0.distcp", bytes);
  const auto contents = DcpFolder::open(folder.path());
  contents->check_records(DcpFolder::Check::kPickles);
  int found = 0;
  for (const size_t part : {0, 1}) {  // each of the two ranks checks its part of the records
    try {
      contents->check_records(DcpFolder::Check::kValues, part, 2);
    } catch (const Error& error) {
      ++found;
      EXPECT_NE(
          std::string(error.what()).find("__0_0.distcp at byte 0, 'model.w': entry 'archive/data/0': its 40 bytes"),
          std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(found, 1);
}

TEST(RankSnapshot, RecordsThatAnExtensionTransformedAreRefusedByName) {
  const testing::TempFolder folder;
  auto contents = saved_by_two(folder.path(), {{"model.w", at::ones({10})}});
  contents.metadata.storage_data[0].second.transform_descriptors = {"stream.zstd/1"};
  publish_file(folder / ".metadata", contents.metadata.dump());
  try {
    DcpFolder::open(folder.path());
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what())
                  .find("__0_0.distcp: the record of 'model.w' was transformed by an extension "
                        "('stream.zstd/1')"),
              std::string::npos)
        << error.what();
  }
}

TEST(RankSnapshot, TiedTensorsAndEqualObjectsAreWrittenOnce) {
  const testing::TempFolder folder;
  const auto tied = at::rand({1000});
  const NamedObjects objects = {{"optim.param_groups.a.lr", 0.5}, {"optim.param_groups.b.lr", 0.5}};
  const auto contents = saved_by_two(folder.path(), {{"model.a", tied}, {"model.b", tied}}, objects);
  EXPECT_LT(contents.files[0].size_bytes + contents.files[1].size_bytes, 8'000U);
  const auto saved = DcpFolder::open(folder.path());
  EXPECT_TRUE(at::equal(saved->tensor("model.a"), tied));
  EXPECT_TRUE(at::equal(saved->tensor("model.b"), tied));
  EXPECT_EQ(saved->object("optim.param_groups.b.lr").as_float(), 0.5);
}

TEST(RankSnapshot, PathsMatchTorchStateDicts) {
  const testing::TempFolder folder;
  const auto contents = saved_by_two(folder.path(), {{"model.layers.0.w", at::ones({1})}, {"modelling", at::ones({1})}},
                                     {{"optim.x", 1}});
  const DcpLookup lookup(contents.metadata);
  EXPECT_EQ(*lookup.find_path("model.layers.0.w"), (DcpPath{"model", "layers.0.w"}));
  EXPECT_EQ(*lookup.find_path("modelling"), (DcpPath{"modelling"}));
  EXPECT_EQ(*lookup.find_path("optim.x"), (DcpPath{"optim", "x"}));
}

TEST(RankSnapshot, MemoryOfASnapshotIsReused) {
  SnapshotPool pool;
  const auto first = pool.copy(at::ones({2, 3}));
  const auto* memory = first.const_data_ptr();
  pool.recycle(first);
  EXPECT_NE(pool.copy(at::ones({6}, at::kDouble)).const_data_ptr(), memory);
  const auto second = pool.copy(at::arange(6, at::kFloat).view({3, 2}).t());
  EXPECT_EQ(second.const_data_ptr(), memory);
  EXPECT_TRUE(at::equal(second, at::arange(6, at::kFloat).view({3, 2}).t()));
  EXPECT_TRUE(second.is_contiguous());
}

TEST(AddReport, RefusesFailuresAndMalformedReports) {
  CheckpointContents contents;
  try {
    add_report(contents, failure_report(3, std::runtime_error("disk \"full\"\xff")));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_EQ(std::string(error.what()).rfind("rank 3: disk \"full\"", 0), 0U) << error.what();
  }
  const std::string tensor = R"({"name": "w", "dtype": 6, "shape": [2], "chunks": )";
  const auto report = [](const std::string& tensors) {
    return R"({"file": "a", "bytes": 1, "xxh3": 2, "objects": [], "tensors": [)" + tensors + "]}";
  };
  for (const std::string& rubbish :
       {std::string(), std::string("[]"), std::string("{}"), std::string(100'000, '['),
        report(tensor + std::string(100'000, '[')), report(tensor + "[{}]}"), report(tensor + "3}"),
        report(R"({"name": "w", "dtype": 1000, "shape": [2], "chunks": []})"),
        report(R"({"name": "w", "dtype": 6, "shape": [-2], "chunks": []})")}) {
    CheckpointContents other;
    EXPECT_THROW(add_report(other, rubbish), std::exception) << rubbish.substr(0, 80);
  }
  CheckpointContents outside;  // a chunk outside its tensor must be found before the checkpoint is published
  add_report(outside, report(tensor + R"([{"offset": [1], "shape": [2], "at": 0, "bytes": 1}]})"));
  EXPECT_THROW(outside.metadata.check("test"), Error);
}

}  // namespace
}  // namespace tessera
