// Tests of the files of torch.save and DCP against Python torch, in both directions.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/files/mapped_file.h"
#include "tessera/formats/torch/dcp_metadata.h"
#include "tessera/formats/torch/torch_dtypes.h"
#include "tessera/formats/torch/torch_save.h"
#include "tessera/formats/torch/torch_save_writer.h"
#include "tests/formats/file_bytes.h"
#include "tests/formats/torch_pattern.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::kSavedDtypes;
using testing::pattern;
using testing::run_python;
using testing::same_tensor;
using testing::TempFolder;

constexpr const char* kTorchScript = "tests/formats/oracle/torch_oracle.py";

at::Tensor tensor_at(const TorchSaveFile& file, const PickleValue* value) {
  const auto* info = value ? file.find_tensor(*value) : nullptr;
  return info ? file.tensor(*info) : at::Tensor();
}

void expect_all_tensors(const TorchSaveFile& file) {
  const auto* tensors = file.root().find("tensors");
  ASSERT_NE(tensors, nullptr);
  EXPECT_EQ(tensors->dict_size(), std::size(kSavedDtypes) * 3);
  for (const auto dtype : kSavedDtypes) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{2, 3}, {}, {0, 4}}) {
      const auto wanted = pattern(dtype, shape, 3);
      const auto name = fmt::format("{}.{}.{}", torch_dtype_name(dtype), shape.size(), wanted.numel());
      const auto found = tensor_at(file, tensors->find(name));
      ASSERT_TRUE(found.defined()) << name;
      EXPECT_TRUE(same_tensor(found, wanted)) << name;
    }
  }
}

PickleValue expected_objects() {
  const auto ints = PickleValue::list({0, 255, 256, 65535, 65536, std::numeric_limits<int32_t>::max(), int64_t{1} << 31,
                                       -1, std::numeric_limits<int32_t>::min(), -(int64_t{1} << 31) - 1,
                                       std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()});
  const auto floats = PickleValue::list({0.1, -0.0, std::numeric_limits<double>::infinity(), 5e-324});
  std::string many_bytes;
  for (int i = 0; i < 200; ++i) many_bytes += std::string("\0\xff", 2);
  const auto nested = PickleValue::dict(
      {{"a", PickleValue::list({PickleValue::dict({{"b", PickleValue::tuple({PickleValue::dict({{"c", 1}})})}})})}});
  return PickleValue::dict({
      {"ints", ints},
      {"floats", floats},
      {"text", "Gr\u00f6\u00dfe \u4e2d\U0001f600\n" + std::string(300, 'x')},
      {"bytes", PickleValue::bytes(many_bytes)},
      {"no_bytes", PickleValue::bytes("")},
      {"tuple", PickleValue::tuple({1, "a", nullptr, true, false})},
      {"unit", PickleValue::tuple({})},
      {"nested", nested},
      {"set", PickleValue::set({1})},
      {3, "three"},
      {PickleValue::tuple({1, 2}), "pair"},
      {"dtype", PickleValue::global("torch", "bfloat16")},
      {"size", PickleValue::call(PickleValue::global("torch", "Size"), {PickleValue::tuple({2, 3})})},
      {"device", PickleValue::call(PickleValue::global("torch", "device"), {"cpu"})},
      {"complex", PickleValue::call(PickleValue::global("builtins", "complex"), {1.0, -2.0})},
      {"layout", PickleValue::call(PickleValue::global("torch.serialization", "_get_layout"), {"torch.strided"})},
      {"ordered", PickleValue::ordered_dict({{"a", 1}, {"b", 2}})},
  });
}

TEST(TorchOracle, FilesOfTorchSaveAreReadCorrectly) {
  TempFolder folder;
  const auto run = run_python(kTorchScript, {"save", folder.path().string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto tied = pattern(at::kFloat, {4, 5}, 7);
  for (const int protocol : {2, 3, 4, 5}) {
    SCOPED_TRACE(protocol);
    const auto file = TorchSaveFile::open(folder / fmt::format("protocol{}.pt", protocol));
    const auto& root = file->root();
    expect_all_tensors(*file);
    EXPECT_TRUE(is_same_pickle(*root.find("objects"), expected_objects()));
    EXPECT_TRUE(same_tensor(tensor_at(*file, root.find("transposed")), tied.t()));
    EXPECT_FALSE(tensor_at(*file, root.find("transposed")).is_contiguous());
    EXPECT_TRUE(same_tensor(tensor_at(*file, root.find("narrow")), tied.narrow(0, 1, 2).narrow(1, 2, 2)));
    const auto ties = root.find("tied")->items();
    EXPECT_EQ(tensor_at(*file, &ties[0]).const_data_ptr(), tensor_at(*file, &ties[1]).const_data_ptr());
    const auto* parameter = file->find_tensor(*root.find("parameter"));
    const auto* frozen = file->find_tensor(*root.find("frozen"));
    ASSERT_TRUE(parameter && frozen);
    EXPECT_TRUE(parameter->is_parameter && parameter->requires_grad && frozen->is_parameter && !frozen->requires_grad);
    EXPECT_TRUE(at::equal(tensor_at(*file, root.find("expanded")), tied[0][0].expand({1000, 1000})));
    EXPECT_TRUE(root.find("module")->is_ordered_dict());
    EXPECT_EQ(tensor_at(*file, root.find("module")->find("weight")).sizes(), (at::IntArrayRef{1, 2}));
    ASSERT_EQ(root.find("many")->dict_size(), 20'000U);
    EXPECT_EQ(root.find("many")->find("name.19999")->as_int(), 19'999);
  }
  expect_all_tensors(*TorchSaveFile::open(folder / "stream.pt"));
  const std::map<std::string, std::string> hostile = {{"system", "'posix.system'"},
                                                      {"eval", "'__builtin__.eval'"},
                                                      {"getattr", "'__builtin__.getattr'"},
                                                      {"big_integer", "an integer of 9 bytes"},
                                                      {"sparse", "_rebuild_sparse_tensor'"},
                                                      {"conjugate", "the bit 'conj' set"},
                                                      {"quantised", "_rebuild_qtensor'"},
                                                      {"frozenset", "'__builtin__.frozenset'"},
                                                      {"function", "'posixpath.join'"},
                                                      {"legacy", "torch before 1.6"},
                                                      {"cycle", "into itself"}};
  for (const auto& [name, reason] : hostile) {
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { TorchSaveFile::open(folder / ("hostile/" + name + ".pt")); }),
                HasSubstr(reason));
  }
}

// A file of consecutive records, and the offset of each.
class RecordFile {
 public:
  explicit RecordFile(const std::filesystem::path& path) : out_(path, std::ios::binary) {}
  ByteSink sink() {
    return [this](std::span<const std::byte> bytes) {
      out_.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    };
  }
  // The offset of the record that was just written; `length` is its size in bytes.
  uint64_t placed(uint64_t length) {
    end_ += length;
    return end_ - length;
  }

 private:
  std::ofstream out_;
  uint64_t end_ = 0;
};

TEST(TorchOracle, TorchReadsOurFiles) {
  TempFolder folder;
  nlohmann::json listed = nlohmann::json::array();
  {
    RecordFile file(folder / "records.bin");
    int64_t seed = 0;
    for (const auto dtype : kSavedDtypes) {
      for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {0, 3}, {70}, {2, 3, 7}}) {
        const bool grad = at::isFloatingType(dtype) && c10::elementSize(dtype) > 1;
        const auto length = write_tensor_record(pattern(dtype, shape, ++seed), file.sink(), {.requires_grad = grad});
        listed.push_back({{"offset", file.placed(length)},
                          {"length", length},
                          {"dtype", torch_dtype_name(dtype)},
                          {"shape", shape},
                          {"seed", seed},
                          {"grad", grad}});
      }
    }
    const std::vector<PickleValue::Pair> objects = {{"lr", 0.1},
                                                    {"betas", PickleValue::tuple({0.9, 0.95})},
                                                    {"fused", nullptr},
                                                    {"params", PickleValue::list({0, 1, 70'000})},
                                                    {"maximize", false},
                                                    {"name", "Gr\u00f6\u00dfe"},
                                                    {"raw", PickleValue::bytes(std::string("\0\xff", 2))},
                                                    {"big", std::numeric_limits<int64_t>::min()},
                                                    {"set", PickleValue::set({1, 2})},
                                                    {"none", PickleValue::bytes("")},
                                                    {"ordered", PickleValue::ordered_dict({{"a", 1}})}};
    for (const auto& [name, object] : objects) {
      const auto length = write_object_record(object, file.sink());
      listed.push_back({{"offset", file.placed(length)}, {"length", length}, {"object", name.as_text()}});
    }
  }
  std::ofstream(folder / "records.json") << listed.dump();
  TorchSaveWriter writer;
  const auto weight = pattern(at::kBFloat16, {64, 32}, 1);
  const auto w = writer.add(weight, {.requires_grad = true}), tied = writer.add(weight);
  const auto b = writer.add(pattern(at::kFloat8_e4m3fn, {3}, 2));
  write_torch_save(folder / "model.pt", writer,
                   PickleValue::ordered_dict(
                       {{"w", w}, {"tied", tied}, {"nested", PickleValue::dict({{"b", PickleValue::list({b, 7})}})}}));
  const auto run = run_python(kTorchScript, {"check", folder.path().string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, fmt::format("{} records equal\n", listed.size()));
}

// The whole tensor, assembled from the records of its chunks.
at::Tensor assembled(const std::filesystem::path& folder, const DcpEntry& entry, const DcpLookup& lookup) {
  const auto whole = at::empty(entry.tensor->size, entry.tensor->dtype);
  for (const auto& chunk : entry.tensor->chunks) {
    const auto& at_file = lookup.storage(entry.name, chunk.offsets);
    const auto map = MappedFile::open(folder / at_file.relative_path);
    const auto bytes = map->bytes().subspan(at_file.offset, at_file.length);
    const auto record = TorchRecord::parse(bytes, at_file.relative_path);
    const auto* info = record.find_tensor(record.root());
    if (!info) {
      ADD_FAILURE() << entry.name << " is no tensor";
      continue;
    }
    EXPECT_EQ(info->sizes, chunk.sizes) << entry.name;
    auto target = whole;
    for (size_t dim = 0; dim < chunk.sizes.size(); ++dim) {
      target = target.narrow(static_cast<int64_t>(dim), chunk.offsets[dim], chunk.sizes[dim]);
    }
    if (target.numel() > 0) target.copy_(record_tensor(bytes, *info, map));
  }
  return whole;
}

DcpMetadata write_our_checkpoint(const std::filesystem::path& folder) {
  std::filesystem::create_directory(folder);
  const auto w = pattern(at::kBFloat16, {5, 3}, 1), s = pattern(at::kFloat, {}, 2);
  const auto f = pattern(at::kFloat8_e4m3fn, {3}, 3);
  RecordFile first(folder / "__0_0.distcp"), second(folder / "__1_0.distcp");
  DcpMetadata metadata;
  const std::string unicode = "model.Gr\u00f6\u00dfe";
  metadata.entries = {
      {"model.w", DcpTensor{.dtype = at::kBFloat16, .size = {5, 3}, .chunks = {{{0, 0}, {3, 3}}, {{3, 0}, {2, 3}}}}},
      {"model.s", DcpTensor{.size = {}, .chunks = {{{}, {}}}}},
      {unicode, DcpTensor{.dtype = at::kFloat8_e4m3fn, .size = {3}, .chunks = {{{0}, {3}}, {{3}, {0}}}}},
      {"n", std::nullopt}};
  metadata.planner_data = {{{"model.w", {"model", "w"}},
                            {"model.s", {"model", "s"}},
                            {unicode, {"model", "Gr\u00f6\u00dfe"}},
                            {"n", {"n"}}}};
  const auto add = [&](const DcpIndex& index, RecordFile& file, const char* name, uint64_t length) {
    metadata.storage_data.push_back({index, {name, file.placed(length), length}});
  };
  add({"n"}, first, "__0_0.distcp", write_object_record(7, first.sink()));
  add({"model.w", {{0, 0}}, 0}, first, "__0_0.distcp", write_tensor_record(w.narrow(0, 0, 3), first.sink()));
  add({"model.s", std::vector<int64_t>{}, 0}, first, "__0_0.distcp", write_tensor_record(s, first.sink()));
  add({"model.w", {{3, 0}}, 1}, second, "__1_0.distcp", write_tensor_record(w.narrow(0, 3, 2), second.sink()));
  add({unicode, {{0}}, 0}, second, "__1_0.distcp", write_tensor_record(f, second.sink()));
  add({unicode, {{3}}, 1}, second, "__1_0.distcp", write_tensor_record(f.narrow(0, 3, 0), second.sink()));
  metadata.storage_meta =
      DcpStorageMeta{.checkpoint_id = folder.string(), .checkpoint_id_is_path = true, .save_id = "1"};
  metadata.version = "1.0.0";
  testing::write_bytes(folder / ".metadata", metadata.dump());
  return metadata;
}

TEST(TorchOracle, DcpCheckpointsReadBitwiseAndTheirMetadataRoundTrips) {
  TempFolder folder;
  auto run = run_python(kTorchScript, {"dcp", folder.path().string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto bytes = read_file(folder / "ck/.metadata");
  EXPECT_GT(bytes.size(), 65'536U);  // the pickle has several frames
  const auto metadata = DcpMetadata::parse(bytes, "theirs");
  const DcpLookup lookup(metadata);
  const auto whole = TorchSaveFile::open(folder / "whole.pt");
  for (size_t i = 0; i < whole->root().dict_size(); ++i) {
    const auto& name = whole->root().key(i).as_text();
    const auto wanted = tensor_at(*whole, &whole->root().value(i));
    EXPECT_TRUE(same_tensor(assembled(folder / "ck", lookup.at(name), lookup), wanted)) << name;
  }
  EXPECT_EQ(lookup.at("model.e").tensor->chunks, (std::vector<DcpChunk>{{{0}, {1}}, {{1}, {0}}}));
  EXPECT_EQ(lookup.at("model.columns").tensor->chunks.size(), 2U);
  EXPECT_EQ(lookup.at("model.replicated").tensor->chunks.size(), 1U);
  EXPECT_EQ(*lookup.find_path("opt.param_groups.0.lr"), (DcpPath{"opt", "param_groups", int64_t{0}, "lr"}));
  const auto object = [&](const char* name) {
    const auto& at_file = lookup.storage(name);
    const auto map = MappedFile::open(folder / "ck" / at_file.relative_path);
    return TorchRecord::parse(map->bytes().subspan(at_file.offset, at_file.length), name).root();
  };
  EXPECT_TRUE(is_same_pickle(object("opt.param_groups.0.lr"), 0.1));
  EXPECT_TRUE(is_same_pickle(object("opt.param_groups.0.params"), PickleValue::list({0, 1})));
  EXPECT_TRUE(is_same_pickle(object("tuple"), PickleValue::tuple({1, "a"})));
  EXPECT_TRUE(object("none").is_none());
  EXPECT_EQ(object("lst.1").as_int(), 5);
  EXPECT_EQ(metadata.storage_meta->checkpoint_id, (folder / "ck").string());
  EXPECT_EQ(metadata.version, "1.0.0");

  testing::write_bytes(folder / "again", metadata.dump());
  const auto ours = write_our_checkpoint(folder / "ours");
  EXPECT_EQ(DcpMetadata::parse(read_file(folder / "ours/.metadata"), "ours"), ours);
  run = run_python(kTorchScript, {"dcp_read", folder.path().string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, fmt::format("{} records equal\n", metadata.storage_data.size()));
}

}  // namespace
}  // namespace tessera
