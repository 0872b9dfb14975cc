// Tests of reading and writing GGUF files, and of the refusal of bad and damaged files.
#include "tessera/formats/gguf/gguf.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/formats/gguf/gguf_writer.h"
#include "tests/formats/file_bytes.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::raw;
using testing::TempFolder;
using testing::write_bytes;

std::string text(const std::string& value) { return raw(static_cast<uint64_t>(value.size())) + value; }

// A GGUF header, followed by `rest`.
std::string header(uint64_t tensors, uint64_t keys, const std::string& rest, uint32_t version = 3) {
  return "GGUF" + raw(version) + raw(tensors) + raw(keys) + rest;
}

std::string tensor_entry(const std::string& name, const std::vector<uint64_t>& sizes, uint32_t type, uint64_t offset) {
  auto entry = text(name) + raw(static_cast<uint32_t>(sizes.size()));
  for (const uint64_t size : sizes) entry += raw(size);
  return entry + raw(type) + raw(offset);
}

void write_sample(const std::filesystem::path& path) {
  GgufWriter writer(path);
  writer.set("general.architecture", std::string("llama"));
  writer.set("u8", uint8_t{200});
  writer.set("i8", int8_t{-3});
  writer.set("u16", uint16_t{60000});
  writer.set("i16", int16_t{-30000});
  writer.set("u32", uint32_t{4000000000});
  writer.set("i32", int32_t{-5});
  writer.set("f32", 1e-5F);
  writer.set("yes", true);
  writer.set("u64", ~uint64_t{0});
  writer.set("i64", int64_t{-1} << 40);
  writer.set("f64", 0.1);
  writer.set("words", GgufArray{std::vector<std::string>{"a", "", "b c"}});
  writer.set("flags", GgufArray{std::vector<bool>{true, false}});
  writer.set("nested", GgufArray{std::vector<GgufArray>{{std::vector<int32_t>{1, -2}}, {std::vector<int32_t>{}}}});
  writer.announce("w", GgmlType::kQ8_0, {3, 64});
  writer.announce("v", GgmlType::kF32, {5});
  writer.announce("h", GgmlType::kF16, {2, 3});
  writer.announce("b", GgmlType::kBF16, {7});
  writer.write("v", at::arange(5, at::kFloat));
  writer.write("w", at::arange(192, at::kFloat).view({3, 64}));
  writer.write("b", at::arange(7, at::kFloat));
  writer.write("h", at::arange(6, at::kFloat).view({2, 3}));
  writer.finish();
}

TEST(Gguf, EveryMetadataTypeAndTensorTypeReadsBack) {
  TempFolder folder;
  write_sample(folder / "a.gguf");
  const auto file = GgufFile::open(folder / "a.gguf");
  EXPECT_EQ(file->version(), 3U);
  EXPECT_EQ(file->find_string("general.architecture"), "llama");
  EXPECT_EQ(file->find_uint("u8"), 200U);
  EXPECT_EQ(file->find_float("i8"), -3.0);
  EXPECT_EQ(file->find_uint("u16"), 60000U);
  EXPECT_EQ(file->find_float("i16"), -30000.0);
  EXPECT_EQ(file->find_uint("u32"), 4000000000U);
  EXPECT_EQ(file->find_float("f32"), static_cast<double>(1e-5F));
  EXPECT_EQ(file->find_bool("yes"), true);
  EXPECT_EQ(file->find_uint("u64"), ~uint64_t{0});
  EXPECT_EQ(std::get<int64_t>(file->metadata().at("i64")), int64_t{-1} << 40);
  EXPECT_EQ(file->find_float("f64"), 0.1);
  EXPECT_THAT(*file->find_strings("words"), ::testing::ElementsAre("a", "", "b c"));
  const auto& flags = std::get<std::vector<bool>>(std::get<GgufArray>(file->metadata().at("flags")).items);
  EXPECT_EQ(flags, (std::vector<bool>{true, false}));
  const auto& nested = std::get<std::vector<GgufArray>>(std::get<GgufArray>(file->metadata().at("nested")).items);
  EXPECT_EQ(std::get<std::vector<int32_t>>(nested.at(0).items), (std::vector<int32_t>{1, -2}));
  EXPECT_EQ(file->find_uint("absent"), std::nullopt);

  EXPECT_EQ(file->tensor_info("w").shape, (std::vector<int64_t>{3, 64}));
  EXPECT_TRUE(at::equal(file->tensor("v"), at::arange(5, at::kFloat)));
  EXPECT_TRUE(at::equal(file->tensor("h"), at::arange(6, at::kHalf).view({2, 3})));
  EXPECT_TRUE(at::equal(file->tensor("b"), at::arange(7, at::kBFloat16)));
  EXPECT_LT((file->tensor("w") - at::arange(192, at::kFloat).view({3, 64})).abs().max().item<float>(), 1.0F);
}

TEST(Gguf, MetadataOfAnotherTypeIsAFormatErrorThatNamesTheKey) {
  TempFolder folder;
  write_sample(folder / "a.gguf");
  const auto file = GgufFile::open(folder / "a.gguf");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->find_uint("i32"); }), HasSubstr("'i32'"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->find_uint("words"); }), HasSubstr("non-negative integer"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->find_string("u8"); }), HasSubstr("a string"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->find_strings("flags"); }), HasSubstr("array of strings"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->require_uint("absent"); }), HasSubstr("has no key 'absent'"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->tensor("absent"); }), HasSubstr("no tensor 'absent'"));
}

struct BadFile {
  const char* name;
  std::string bytes;
  const char* message;
};
std::string nested_arrays(int depth) {
  std::string bytes = text("k") + raw(uint32_t{9});
  for (int i = 0; i < depth; ++i) bytes += raw(uint32_t{9}) + raw(uint64_t{1});
  return bytes + raw(uint32_t{0}) + raw(uint64_t{0});
}

const std::string kPad(64, '\0');
const std::vector<BadFile> kBadFiles = {
    {"Empty", "", "the magic number"},
    {"Magic", "GGML" + kPad, "not with 'GGUF'"},
    {"Version1", header(0, 0, kPad, 1), "version 1, wanted 2 or 3"},
    {"BigEndian", header(0, 0, kPad, 0x03000000), "big-endian"},
    {"TensorCount", header(uint64_t{1} << 60, 0, kPad), "tensors at byte 8 cannot fit"},
    {"KeyCount", header(0, ~uint64_t{0}, kPad), "metadata keys"},
    {"KeyLength", header(0, 1, raw(~uint64_t{0}) + kPad), "a metadata key"},
    {"ValueType", header(0, 1, text("k") + raw(uint32_t{13}) + kPad), "unknown value type 13"},
    {"Bool", header(0, 1, text("k") + raw(uint32_t{7}) + "\x02" + kPad), "wanted 0 or 1"},
    {"ArrayType", header(0, 1, text("k") + raw(uint32_t{9}) + raw(uint32_t{99}) + raw(uint64_t{1}) + kPad),
     "unknown array type 99"},
    {"ArrayCount", header(0, 1, text("k") + raw(uint32_t{9}) + raw(uint32_t{8}) + raw(uint64_t{64}) + kPad),
     "64 strings cannot fit"},
    {"ArrayNumbers", header(0, 1, text("k") + raw(uint32_t{9}) + raw(uint32_t{10}) + raw(uint64_t{64}) + kPad),
     "cannot fit"},
    {"ArrayDepth", header(0, 1, nested_arrays(1000) + kPad), "nested deeper than 4"},
    {"DuplicateKey", header(0, 2, text("k") + raw(uint32_t{0}) + "1" + text("k") + raw(uint32_t{0}) + "1" + kPad),
     "key 'k' occurs twice"},
    {"Alignment", header(0, 1, text("general.alignment") + raw(uint32_t{4}) + raw(uint32_t{24}) + kPad),
     "wanted a power of two"},
    {"AlignmentZero", header(0, 1, text("general.alignment") + raw(uint32_t{4}) + raw(uint32_t{0}) + kPad),
     "wanted a power of two"},
    {"Rank", header(1, 0, tensor_entry("t", {1, 1, 1, 1, 1}, 0, 0) + kPad), "5 dimensions"},
    {"ShapeOverflow", header(1, 0, tensor_entry("t", {uint64_t{1} << 40, uint64_t{1} << 40}, 0, 0) + kPad),
     "zero or too large"},
    {"ZeroSize", header(1, 0, tensor_entry("t", {0}, 0, 0) + kPad), "zero or too large"},
    {"TensorType", header(1, 0, tensor_entry("t", {32}, 4, 0) + kPad), "unknown type 4"},
    {"Block", header(1, 0, tensor_entry("t", {33}, 8, 0) + kPad), "no multiple of the 32 elements"},
    {"OffsetUnaligned", header(1, 0, tensor_entry("t", {4}, 0, 4) + kPad), "offset 4 is no multiple of 32"},
    {"OffsetOverflow", header(1, 0, tensor_entry("t", {4}, 0, ~uint64_t{31}) + kPad), "ends at data byte"},
    {"BeyondEnd", header(1, 0, tensor_entry("t", {400}, 0, 0) + kPad), "cut off"},
    {"DuplicateTensor", header(2, 0, tensor_entry("t", {4}, 0, 0) + tensor_entry("t", {4}, 0, 32) + kPad + kPad),
     "occurs twice"},
    {"Overlap", header(2, 0, tensor_entry("t", {12}, 0, 0) + tensor_entry("u", {4}, 0, 32) + kPad + kPad + kPad),
     "inside the tensor before"}};

TEST(Gguf, BadFilesAreRefusedWithTheReason) {
  for (const auto& bad : kBadFiles) {
    SCOPED_TRACE(bad.name);
    TempFolder folder;
    write_bytes(folder / "a.gguf", bad.bytes);
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { GgufFile::open(folder / "a.gguf"); }), HasSubstr(bad.message));
  }
}

TEST(Gguf, UnsupportedTypesOpenButDoNotDecode) {
  TempFolder folder;
  write_bytes(folder / "a.gguf", header(1, 0, tensor_entry("t", {256}, 10, 0)) + std::string(200, '\0'));
  const auto file = GgufFile::open(folder / "a.gguf");
  EXPECT_EQ(file->tensor_info("t").type_name(), "Q2_K");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->tensor("t"); }), HasSubstr("is Q2_K, which cannot be decoded"));
}

TEST(Gguf, DamagedFilesAreRefusedOrReadButNeverCrash) {
  TempFolder folder;
  GgufWriter writer(folder / "good");
  writer.set("general.alignment", uint32_t{32});
  writer.set("words", GgufArray{std::vector<std::string>{"ab", "c"}});
  writer.set("nested", GgufArray{std::vector<GgufArray>{{std::vector<int32_t>{1}}, {std::vector<float>{2}}}});
  writer.announce("q", GgmlType::kQ8_0, {2, 32});
  writer.announce("h", GgmlType::kF16, {16});
  writer.write("q", at::ones({2, 32}));
  writer.write("h", at::ones({16}));
  writer.finish();
  testing::expect_survives_damage(folder / "good", folder / "bad", 3000, [](const std::filesystem::path& path) {
    const auto file = GgufFile::open(path);
    for (const auto& [name, info] : file->tensors()) file->tensor(name).to(at::kFloat).sum().item();
  });
}

TEST(GgufWriter, DroppedWriterLeavesNoFileAndWrongTensorsAreRefused) {
  TempFolder folder;
  {
    GgufWriter writer(folder / "a.gguf");
    writer.announce("t", GgmlType::kQ8_0, {2, 32});
    error_of(ErrorKind::kShape, [&] { writer.announce("u", GgmlType::kQ8_0, {32, 2}); });
    error_of(ErrorKind::kInternal, [&] { writer.announce("v", GgmlType::kQ4_K, {256}); });
    error_of(ErrorKind::kShape, [&] { writer.write("t", at::ones({32, 2})); });
    error_of(ErrorKind::kInternal, [&] { writer.finish(); });
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace tessera
