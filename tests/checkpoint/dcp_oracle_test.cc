// Tests of checkpoints against PyTorch: torch.distributed.checkpoint on gloo ranks writes checkpoints that we read, and
// reads ours.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tests/support/process.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::run_python;
using testing::TempFolder;

constexpr const char* kRanksScript = "tests/checkpoint/oracle/dcp_ranks.py";

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         at::equal(a.contiguous().view({-1}).view(at::kByte), b.contiguous().view({-1}).view(at::kByte));
}

// Reads every tensor of a checkpoint that PyTorch wrote, whole and as shards of other layouts.
void expect_read(const std::filesystem::path& folder, const std::filesystem::path& whole_path) {
  const auto whole = SafetensorsFile::open(whole_path);
  const auto contents = DcpFolder::open(folder);
  contents->check_records();
  ASSERT_GE(whole->entries().size(), 30U);
  for (const auto& [name, entry] : whole->entries()) {
    EXPECT_TRUE(same_bits(contents->tensor(name), whole->tensor(name))) << folder << " " << name;
  }
  EXPECT_EQ(contents->object("optim.param_groups.head.bias.lr").as_float(), 0.01);
  for (const int ranks : {1, 3}) {
    testing::run_ranks({.size = ranks}, [&](const std::shared_ptr<comm::World>& world) {
      const auto mesh = init_device_mesh(world, testing::test_device_type(), {ranks});
      const auto checkpoint = Checkpoint::open(folder, *world->group());
      EXPECT_FALSE(checkpoint.has_hashes());
      for (const int64_t dim : {0, -1}) {
        NamedTensors into;
        for (const auto& [name, entry] : whole->entries()) {
          const auto empty = testing::here(at::zeros(entry.shape, at::TensorOptions(entry.dtype)));
          into.emplace_back(name,
                            entry.shape.empty() ? empty : distribute_tensor(empty, mesh, {Shard(dim)}, std::nullopt));
        }
        checkpoint.load(into);
        for (const auto& [name, tensor] : into) {
          const auto found = is_dtensor(tensor) ? full_tensor(tensor) : tensor;
          EXPECT_TRUE(same_bits(found.cpu(), whole->tensor(name))) << folder << " " << name << " dim " << dim;
        }
      }
    });
  }
}

TEST(DcpOracle, FoldersOfFsdp1Fsdp2AndTensorParallelAreRead) {
  const TempFolder folder;
  const auto run =
      run_python(kRanksScript, {"write", "2", folder.path().string(), "fsdp2", "fsdp1", "fsdp1_mesh", "tp", "fsdp_tp"},
                 {.timeout_seconds = 200});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const auto* kind : {"fsdp2", "fsdp1", "fsdp1_mesh", "tp", "fsdp_tp"}) {
    expect_read(folder / kind, folder / fmt::format("{}.safetensors", kind));
  }
  expect_read(folder / "fsdp2_alone", folder / "fsdp2.safetensors");  // this checkpoint has one .metadata per rank
  // The model's tensors have their own names, whichever wrapper holds them.
  const auto whole = SafetensorsFile::open(folder / "fsdp2.safetensors");
  for (const auto& [name, format] : {std::pair("fsdp2_shards", TensorFiles::Format::kSafetensorsShards),
                                     {"fsdp2", TensorFiles::Format::kDcp},
                                     {"fsdp2_alone", TensorFiles::Format::kDcp},
                                     {"fsdp2.pt", TensorFiles::Format::kTorchSave}}) {
    const auto files = TensorFiles::open(folder / name, {.weights_only = true});
    EXPECT_EQ(files->format(), format);
    EXPECT_EQ(files->tensors().size(), 11U) << name;
    for (const auto& [weight, stored] : files->tensors()) {
      EXPECT_TRUE(same_bits(files->tensor(weight), whole->tensor("model." + weight))) << name << " " << weight;
      if (stored.shape.size() != 2) continue;
      const auto box = at::empty({stored.shape[0] - 1, 2}, at::TensorOptions(stored.dtype));
      files->read(weight, {1, 1}, box);
      const auto wanted = whole->tensor("model." + weight).narrow(0, 1, stored.shape[0] - 1).narrow(1, 1, 2);
      EXPECT_TRUE(same_bits(box, wanted)) << name << " " << weight;
    }
  }
  EXPECT_EQ(TensorFiles::open(folder / "fsdp2.pt")->at("lists.0.0").shape, (std::vector<int64_t>{2}));
  std::filesystem::remove(folder / "fsdp2_shards/shard-00001-model-00001-of-00001.safetensors");
  try {
    TensorFiles::open(folder / "fsdp2_shards");
    ADD_FAILURE() << "half of a checkpoint was opened";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("the shards of rank 1 are missing"));
  }
}

TEST(DcpOracle, FoldersOfFourRanksAreRead) {
  const TempFolder folder;
  const auto run = run_python(
      kRanksScript, {"write", "4", folder.path().string(), "fsdp2", "fsdp1", "fsdp1_mesh", "tp", "fsdp_tp", "hsdp"},
      {.timeout_seconds = 200});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const auto* kind : {"fsdp2", "fsdp1", "fsdp1_mesh", "tp", "fsdp_tp", "hsdp"}) {
    expect_read(folder / kind, folder / fmt::format("{}.safetensors", kind));
  }
}

at::Tensor drawn(at::IntArrayRef shape, c10::ScalarType dtype, int64_t seed) {
  const auto numbers = at::arange(c10::multiply_integers(shape), at::kDouble).mul(0.37).add(static_cast<double>(seed));
  return testing::here(numbers.sin().mul(50).to(dtype).view(shape));
}

// Tensors of all kinds: uneven sizes, strided shards, replicas, plain tensors, a dim of 0, a scalar, tied tensors and
// many dtypes.
NamedTensors all_kinds(const MeshPtr& mesh) {
  const auto lay = [&](at::IntArrayRef shape, c10::ScalarType dtype, const Placements& how) {
    return distribute_tensor(drawn(shape, dtype, shape.empty() ? 1 : shape[0]), mesh, how, std::nullopt);
  };
  const auto tied = lay({11, 2}, at::kFloat, {Shard(0), Replicate()});
  return {{"model.fsdp", lay({7, 3}, at::kFloat, {Replicate(), Shard(0)})},
          {"model.fsdp_tp", lay({13, 2}, at::kBFloat16, {StridedShard(0, 2), Shard(0)})},
          {"model.pieces", lay({11, 4}, at::kDouble, {StridedShard(0, 3), Replicate()})},
          {"model.columns", lay({3, 5}, at::kHalf, {Replicate(), Shard(1)})},
          {"model.unicode.\xc3\xa4", lay({2}, at::kLong, {Shard(0), Shard(0)})},
          {"model.tied.a", tied},
          {"model.tied.b", tied},
          {"model.empty", lay({0, 4}, at::kFloat, {Shard(0), Shard(1)})},
          {"optim.state.x.step", drawn({}, at::kFloat, 9)},
          {"optim.state.x.flags", drawn({9}, at::kInt, 2).remainder(2).to(at::kBool)},
          {"optim.state.x.fp8", drawn({9}, at::kFloat, 2).to(at::kFloat8_e4m3fn)}};
}

TEST(DcpOracle, TorchReadsOurCheckpointsOnOneTwoAndFourRanks) {
  const TempFolder folder;
  std::vector<std::string> arguments = {"read", "", (folder / "whole").string()};
  for (const auto& [ranks, dp] : {std::pair(1, 1), std::pair(4, 2)}) {
    const auto runs = folder / std::to_string(ranks);
    testing::run_ranks({.size = ranks}, [&, ranks = ranks, dp = dp](const std::shared_ptr<comm::World>& world) {
      const auto mesh = init_device_mesh(world, testing::test_device_type(), {dp, ranks / dp}, {"dp", "tp"});
      CheckpointWriter writer({.folder = runs, .world = world});
      writer.save(3, all_kinds(mesh), {}, std::nullopt, {{"optim.param_groups.x.lr", 0.5}});
      writer.finish();
      if (world->size() > 1) return;
      std::vector<SafetensorsSpec> specs;
      for (const auto& [name, tensor] : all_kinds(mesh)) {
        specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
      }
      SafetensorsWriter whole(folder / "whole.safetensors", specs);
      for (const auto& [name, tensor] : all_kinds(mesh)) {
        whole.write(name, (is_dtensor(tensor) ? full_tensor(tensor) : tensor).cpu());
      }
      whole.finish();
    });
    arguments.push_back((runs / "step-00000003").string());
  }
  for (const char* ranks : {"1", "2", "4"}) {
    arguments[1] = ranks;
    const auto run = run_python(kRanksScript, arguments, {.timeout_seconds = 200});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.out, "11 tensors equal\n11 tensors equal\n") << ranks;
  }
}

}  // namespace
}  // namespace tessera
