// Tests of reading and writing safetensors files and sharded folders, and of the refusal of bad and damaged files.
#include "tessera/formats/safetensors/safetensors.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tests/formats/file_bytes.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::raw;
using testing::TempFolder;
using testing::write_bytes;

std::string file_of(const std::string& header, size_t data_bytes) {
  return raw(static_cast<uint64_t>(header.size())) + header + std::string(data_bytes, '\x01');
}

size_t count_files(const TempFolder& folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder.path()), {}));
}

TEST(Safetensors, EveryDtypeAndShapeReadsBackBitwise) {
  TempFolder folder;
  std::vector<std::pair<SafetensorsSpec, at::Tensor>> all;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {0, 3}, {5}, {2, 3, 7}}) {
      const auto name = fmt::format("{}.{}", c10::toString(dtype), shape.size());
      all.push_back({{name, dtype, shape}, at::randint(0, 2, shape).mul(3).to(dtype)});
    }
  }
  std::vector<SafetensorsSpec> specs;
  for (const auto& [spec, tensor] : all) specs.push_back(spec);
  SafetensorsWriter writer(folder / "a.safetensors", specs, {{"format", "pt"}, {"note", "\u00e9\n"}});
  for (const auto& [spec, tensor] : all) writer.write(spec.name, tensor);
  writer.finish();

  const auto file = SafetensorsFile::open(folder / "a.safetensors");
  EXPECT_EQ(file->metadata().at("note"), "\u00e9\n");
  ASSERT_EQ(file->entries().size(), all.size());
  for (const auto& [spec, tensor] : all) {
    const auto read = file->tensor(spec.name);
    EXPECT_EQ(read.scalar_type(), spec.dtype);
    EXPECT_EQ(read.sizes(), tensor.sizes());
    EXPECT_TRUE(at::equal(read.to(at::kDouble), tensor.to(at::kDouble))) << spec.name;
  }
}

TEST(Safetensors, TensorsShareOneMappingAndOutliveTheFile) {
  TempFolder folder;
  const auto a = at::randn({64, 32}), b = at::randn({16});
  SafetensorsWriter writer(folder / "m.safetensors", {{"b", at::kFloat, {16}}, {"a", at::kFloat, {64, 32}}});
  writer.write("b", b);
  writer.write("a", a);
  writer.finish();
  auto file = SafetensorsFile::open(folder / "m.safetensors");
  const auto whole = file->tensor("a"), rows = file->read_rows("a", 10, 20), other = file->tensor("b");
  EXPECT_EQ(rows.const_data_ptr<float>(), whole.const_data_ptr<float>() + 10 * 32);  // the same bytes, not a copy
  EXPECT_EQ(other.const_data_ptr<float>(), whole.const_data_ptr<float>() + 64 * 32);
  file.reset();
  std::filesystem::remove(folder / "m.safetensors");
  EXPECT_TRUE(at::equal(rows, a.narrow(0, 10, 10)));
  EXPECT_TRUE(at::equal(other, b));
}

TEST(Safetensors, SlicesEqualNarrowedTensorsAndBadRangesAreShapeErrors) {
  TempFolder folder;
  const auto a = at::randn({6, 5, 4});
  SafetensorsWriter writer(folder / "m.safetensors", {{"a", at::kFloat, {6, 5, 4}}});
  writer.write("a", a);
  writer.finish();
  const auto file = SafetensorsFile::open(folder / "m.safetensors");
  for (int64_t begin = 0; begin <= 5; ++begin) {
    for (int64_t end = begin; end <= 5; ++end) {
      const IndexRange ranges[] = {{1, 5}, {begin, end}, {0, 4}};
      const auto slice = file->read_slice("a", ranges);
      EXPECT_TRUE(slice.is_contiguous());
      EXPECT_TRUE(at::equal(slice, a.narrow(0, 1, 4).narrow(1, begin, end - begin)));
    }
  }
  EXPECT_THAT(error_of(ErrorKind::kShape, [&] { file->read_rows("a", 2, 7); }), HasSubstr("[2, 7) is no range"));
  EXPECT_THAT(error_of(ErrorKind::kShape, [&] { file->read_rows("a", -1, 2); }), HasSubstr("no range"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { file->tensor("b\n"); }), HasSubstr("no tensor 'b\\n'"));
}

TEST(Safetensors, MisalignedTensorsAreReadCorrectly) {
  TempFolder folder;
  const std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("f":{"dtype":"F32","shape":[2,2],"data_offsets":[1,17]}})";
  const float values[] = {1.5F, -2.F, 3.F, 4.F};
  auto bytes = raw(static_cast<uint64_t>(header.size())) + header + "\x07";
  bytes.append(reinterpret_cast<const char*>(values), sizeof values);
  write_bytes(folder / "m.safetensors", bytes);
  const auto file = SafetensorsFile::open(folder / "m.safetensors");
  EXPECT_TRUE(at::equal(file->tensor("f"), at::tensor({1.5F, -2.F, 3.F, 4.F}).view({2, 2})));
  EXPECT_TRUE(at::equal(file->read_rows("f", 1, 2), at::tensor({3.F, 4.F}).view({1, 2})));
}

struct BadHeader {
  const char* name;
  std::string header;
  size_t data_bytes;
  const char* message;
};

const std::string kOffsets = R"("shape":[2],"data_offsets":[0,8]})";
const std::vector<BadHeader> kBadHeaders = {
    {"NotJson", "{]", 0, "not JSON at byte"},
    {"Array", "[]", 0, "begin with '{'"},
    {"Empty", "", 0, "begin with '{'"},
    {"RestAfterObject", "{} {}", 0, "not JSON"},
    {"BadUtf8", "{\"\xff\":1}", 0, "not JSON"},
    {"DuplicateName", R"({"a":{"dtype":"F32",)" + kOffsets + R"(,"a":{"dtype":"F32",)" + kOffsets + "}", 8,
     "the name twice"},
    {"DuplicateKey", R"({"a":{"dtype":"F32","dtype":"F32",)" + kOffsets + "}", 8, "twice"},
    {"UnknownKey", R"({"a":{"x":1,"dtype":"F32",)" + kOffsets + "}", 8, "unknown key 'x'"},
    {"UnknownDtype", R"({"a":{"dtype":"F31",)" + kOffsets + "}", 8, "'F31' is not supported"},
    {"MissingShape", R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8, "no complete"},
    {"NegativeSize", R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "negative"},
    {"FractionalSize", R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "fraction"},
    {"TextSize", R"({"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})", 8, "string"},
    {"NestedSize", R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", 8, "array"},
    {"ThreeOffsets", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8, "more than two"},
    {"Overflow", R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0, "2^63"},
    {"EmptyOverflow", R"({"a":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0, "2^63"},
    {"WrongSize", R"({"a":{"dtype":"F64",)" + kOffsets + "}", 8, "is 16 bytes"},
    {"BackwardOffsets", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "data_offsets [8, 0]"},
    {"BeyondEnd", R"({"a":{"dtype":"F32",)" + kOffsets + "}", 7, "cut off"},
    {"RestAfterData", R"({"a":{"dtype":"F32",)" + kOffsets + "}", 9, "9 bytes of data, but the tensors cover 8"},
    {"Gap", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12, "leave gaps"},
    {"Overlap", R"({"a":{"dtype":"F32",)" + kOffsets + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12,
     "neither overlap"},
    {"MetadataNumber", R"({"__metadata__":{"a":1}})", 0, "number"},
    {"MetadataTwice", R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
    {"DeepNesting", R"({"a":)" + std::string(100000, '['), 0, "array where none is due"}};

TEST(Safetensors, BadHeadersAreRefusedWithTheReason) {
  for (const auto& bad : kBadHeaders) {
    SCOPED_TRACE(bad.name);
    TempFolder folder;
    write_bytes(folder / "m.safetensors", file_of(bad.header, bad.data_bytes));
    const auto message = error_of(ErrorKind::kFormat, [&] { SafetensorsFile::open(folder / "m.safetensors"); });
    EXPECT_THAT(message, HasSubstr(bad.message));
    EXPECT_THAT(message, HasSubstr("m.safetensors"));
  }
}

TEST(Safetensors, HeaderLengthBeyondTheFileOrTheLimitIsRefused) {
  TempFolder folder;
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 40, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    write_bytes(folder / "m.safetensors", raw(length) + "{}");
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { SafetensorsFile::open(folder / "m.safetensors"); }),
                HasSubstr("announces a header"));
  }
}

TEST(Safetensors, DamagedFilesAreRefusedOrReadButNeverCrash) {
  TempFolder folder;
  SafetensorsWriter writer(folder / "good",
                           {{"a.weight", at::kFloat, {2, 3}}, {"b", at::kBool, {3}}, {"c", at::kHalf, {}}});
  writer.write("a.weight", at::ones({2, 3}));
  writer.write("b", at::ones({3}, at::kBool));
  writer.write("c", at::ones({}, at::kHalf));
  writer.finish();
  testing::expect_survives_damage(folder / "good", folder / "bad", 3000, [](const std::filesystem::path& path) {
    const auto file = SafetensorsFile::open(path);
    for (const auto& [name, entry] : file->entries()) file->tensor(name).to(at::kDouble).sum().item();
  });
}

TEST(SafetensorsWriter, DroppedOrFailedWritersLeaveNoFile) {
  TempFolder folder;
  {
    SafetensorsWriter writer(folder / "a", {{"x", at::kFloat, {4}}});
    EXPECT_THAT(error_of(ErrorKind::kShape, [&] { writer.write("x", at::ones({5})); }),
                HasSubstr("but Float [4] was announced"));
    EXPECT_THAT(error_of(ErrorKind::kShape, [&] { writer.write("x", at::ones({4}, at::kHalf)); }),
                HasSubstr("Half [4]"));
    EXPECT_THAT(error_of(ErrorKind::kInternal, [&] { writer.finish(); }), HasSubstr("not written"));
    EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  }
  EXPECT_EQ(count_files(folder), 0U);
  error_of(ErrorKind::kIo, [&] { SafetensorsWriter(folder / "missing" / "a", {}); });
}

std::vector<SafetensorsSpec> ten_tensors() {
  std::vector<SafetensorsSpec> specs;
  for (int i = 0; i < 10; ++i) specs.push_back({"t" + std::to_string(i), at::kFloat, {25}});  // 100 bytes each
  return specs;
}

void write_ten(const std::filesystem::path& dir, uint64_t max_shard_bytes) {
  SafetensorsFolderWriter writer(dir, ten_tensors(), {.max_shard_bytes = max_shard_bytes});
  for (int i = 9; i >= 0; --i) writer.write("t" + std::to_string(i), at::full({25}, static_cast<float>(i)));
  writer.finish();
}

TEST(SafetensorsFolder, ShardsHoldAtMostTheLimitAndReadBack) {
  TempFolder folder;
  write_ten(folder.path(), 350);
  EXPECT_EQ(count_files(folder), 5U);  // 3 + 3 + 3 + 1 tensors, and the index
  const auto read = SafetensorsFolder::open(folder.path());
  ASSERT_EQ(read.files().size(), 10U);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(at::equal(read.tensor("t" + std::to_string(i)), at::full({25}, static_cast<float>(i))));
  }
  TempFolder small, single;
  write_ten(small.path(), 1);  // every tensor is larger than the limit
  EXPECT_EQ(count_files(small), 11U);
  write_ten(single.path(), 1 << 20);
  EXPECT_EQ(count_files(single), 1U);
  EXPECT_TRUE(SafetensorsFolder::open(single / "model.safetensors").contains("t3"));
}

struct BadIndex {
  const char* name;
  std::string text;
  ErrorKind kind;
  const char* message;
};
const std::vector<BadIndex> kBadIndexs = {
    {"NotJson", "{", ErrorKind::kFormat, "no valid JSON"},
    {"Deep", std::string(100'000, '['), ErrorKind::kFormat, "nested deeper than 16 levels"},
    {"NoMap", "{}", ErrorKind::kFormat, "weight_map"},
    {"MapIsList", R"({"weight_map":[]})", ErrorKind::kFormat, "weight_map"},
    {"Number", R"({"weight_map":{"t0":3}})", ErrorKind::kFormat, "weight_map.t0: found 3, wanted a string"},
    {"Missing", R"({"weight_map":{"t0":"gone.safetensors"}})", ErrorKind::kIo, "not there"},
    {"Parent", R"({"weight_map":{"t0":"../model.safetensors"}})", ErrorKind::kFormat, "wanted a file of this folder"},
    {"Absolute", R"({"weight_map":{"t0":"/etc/passwd"}})", ErrorKind::kFormat, "wanted a file of this folder"},
    {"Zero", R"({"weight_map":{"t0":"a\u0000b"}})", ErrorKind::kFormat, "wanted a file of this folder"},
    {"Symlink", R"({"weight_map":{"t0":"link.safetensors"}})", ErrorKind::kFormat, "leads outside"},
    {"NotInFile", R"({"weight_map":{"x":"inside.safetensors"}})", ErrorKind::kFormat, "is not in"}};

TEST(SafetensorsFolder, BadIndexesAreRefusedWithTheReason) {
  for (const auto& bad : kBadIndexs) {
    SCOPED_TRACE(bad.name);
    TempFolder outer;
    const auto dir = outer / "model";
    std::filesystem::create_directory(dir);
    write_ten(outer.path(), 1 << 20);  // a valid file that lies outside
    std::filesystem::copy_file(outer / "model.safetensors", dir / "inside.safetensors");
    std::filesystem::create_symlink(outer / "model.safetensors", dir / "link.safetensors");
    write_bytes(dir / "model.safetensors.index.json", bad.text);
    EXPECT_THAT(error_of(bad.kind, [&] { SafetensorsFolder::open(dir); }), HasSubstr(bad.message));
  }
}

TEST(SafetensorsFolder, HubCacheLinksAreFollowed) {
  TempFolder outer;
  const auto blobs = outer / "blobs", snapshot = outer / "snapshots" / "abc";
  std::filesystem::create_directories(blobs);
  std::filesystem::create_directories(snapshot);
  write_ten(blobs, 1 << 20);
  std::filesystem::create_symlink("../../blobs/model.safetensors", snapshot / "s.safetensors");
  write_bytes(snapshot / "model.safetensors.index.json", R"({"weight_map":{"t3":"s.safetensors"}})");
  EXPECT_TRUE(SafetensorsFolder::open(snapshot).contains("t3"));
}

TEST(SafetensorsFolder, FolderWithoutTensorsIsAnIoError) {
  TempFolder folder;
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { SafetensorsFolder::open(folder.path()); }), HasSubstr("holds neither"));
}

}  // namespace
}  // namespace tessera
