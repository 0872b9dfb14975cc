// Tests of torch.save records: written records are read back bitwise, and inconsistent records are refused.
#include "tessera/formats/torch/torch_save.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tessera/base/files/file.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/torch_dtypes.h"
#include "tessera/formats/torch/torch_save_writer.h"
#include "tests/formats/file_bytes.h"
#include "tests/formats/torch_pattern.h"
#include "tests/support/largest_allocation.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::bytes_of_text;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kSavedDtypes;
using testing::pattern;
using testing::same_tensor;
using testing::StringSink;
using testing::TempFolder;

at::Tensor tensor_of(const std::string& record) {
  const auto keep = std::make_shared<const std::string>(record);
  const auto parsed = TorchRecord::parse(bytes_of_text(*keep), "r");
  const auto* info = parsed.find_tensor(parsed.root());
  return info ? record_tensor(bytes_of_text(*keep), *info, keep) : at::Tensor();
}

TEST(TorchSave, EveryDtypeAndShapeReadsBackBitwiseAndItsLengthIsPredicted) {
  for (const auto dtype : kSavedDtypes) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {0, 3}, {5}, {2, 3, 7}, {300, 5}}) {
      const auto tensor = pattern(dtype, shape, 3);
      StringSink out;
      const auto length = write_tensor_record(tensor, out.sink());
      SCOPED_TRACE(fmt::format("{} of {} dims", torch_dtype_name(dtype), shape.size()));
      EXPECT_EQ(length, out.bytes.size());
      EXPECT_EQ(length, tensor_record_bytes(dtype, shape));
      EXPECT_TRUE(same_tensor(tensor_of(out.bytes), tensor));
      const auto record = TorchRecord::parse(bytes_of_text(out.bytes), "r");
      const auto* info = record.find_tensor(record.root());
      ASSERT_NE(info, nullptr);
      const auto contiguous = tensor.contiguous();
      EXPECT_EQ(info->strides, contiguous.strides().vec());
      EXPECT_EQ(info->begin() % 64, 0U);
      EXPECT_EQ(info->nbytes(), tensor.nbytes());
      EXPECT_EQ(out.bytes.substr(info->begin(), info->nbytes()),
                std::string(static_cast<const char*>(contiguous.const_data_ptr()), contiguous.nbytes()));
    }
  }
}

TEST(TorchSave, CorruptBytesFailTheCrcCheck) {
  const auto tensor = at::full({4}, 1.5F);
  StringSink out;
  write_tensor_record(tensor, out.sink());
  const auto record = TorchRecord::parse(bytes_of_text(out.bytes), "r");
  const auto info = *record.find_tensor(record.root());
  check_storage_crc(bytes_of_text(out.bytes), info, "r");
  auto values = out.bytes, text = out.bytes;
  values[info.begin() + 3] ^= 1;
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { check_storage_crc(bytes_of_text(values), info, "r"); }),
              HasSubstr("[zip] r: entry 'archive/data/0': its 16 bytes have the CRC"));
  TorchRecord::parse(bytes_of_text(values), "r");  // parsing reads no values
  text[text.find("FloatStorage")] = 'f';
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { TorchRecord::parse(bytes_of_text(text), "r"); }),
              HasSubstr("[zip] r: entry 'archive/data.pkl': its "));

  const TempFolder folder;
  publish_file(folder / "w.pt", values);
  const auto files = TensorFiles::open(folder / "w.pt");
  const auto& [name, stored] = *files->tensors().begin();
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { files->tensor(name); }), HasSubstr("w.pt: entry 'archive/data/0'"));
  const auto part = at::zeros({2});
  files->read(name, {2}, part);  // the CRC needs the whole entry, so reading a part does not check it
  EXPECT_TRUE(part.equal(tensor.narrow(0, 0, 2)));
}

TEST(TorchSave, ViewsAreStoredWithoutTheRestOfTheirStorage) {
  const auto big = pattern(at::kFloat, {1000, 10}, 1);
  for (const auto& view :
       {big.narrow(0, 7, 2), big.t().narrow(0, 1, 1), big.select(1, 3), big[5][5], at::zeros({1}).expand({40})}) {
    StringSink out;
    EXPECT_EQ(write_tensor_record(view, out.sink()),
              tensor_record_bytes(at::kFloat, {view.sizes().data(), view.sizes().size()}));
    EXPECT_LT(out.bytes.size(), 6000U);
    EXPECT_TRUE(same_tensor(tensor_of(out.bytes), view));
  }
  const auto complex = at::randn({3, 4}, at::kComplexFloat);
  for (const auto& lazy : {complex.conj(), at::imag(complex.conj())}) {
    StringSink out;
    write_tensor_record(lazy, out.sink());
    EXPECT_TRUE(at::equal(tensor_of(out.bytes), lazy.resolve_conj().resolve_neg()));
  }
}

TEST(TorchSave, WriterHoldsOneTensorInMemoryAtATime) {
  std::vector<at::Tensor> tensors;
  TorchSaveWriter writer;
  std::vector<PickleValue> leaves;
  for (int i = 0; i < 8; ++i) {
    tensors.push_back(pattern(at::kFloat, {1000, 100}, i).t());  // the writer must copy it to make it row-major
    leaves.push_back(writer.add(tensors.back()));
  }
  const auto record = std::make_shared<testing::LargestAllocation>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
  uint64_t total = 0;
  const auto length = writer.write(PickleValue::list(leaves), [&](auto bytes) { total += bytes.size(); });
  EXPECT_EQ(total, length);
  EXPECT_GT(length, 8U * 400'000);
  EXPECT_LE(record->largest, 400'000);
}

TEST(TorchSave, ObjectsReadBackTheSame) {
  const auto group = PickleValue::dict({{"lr", 0.1},
                                        {"betas", PickleValue::tuple({0.9, 0.95})},
                                        {"fused", nullptr},
                                        {"params", PickleValue::list({0, 1})},
                                        {"maximize", false},
                                        {"name", "Gr\u00f6\u00dfe"},
                                        {"raw", PickleValue::bytes(std::string("\0\xff", 2))},
                                        {"big", std::numeric_limits<int64_t>::min()},
                                        {"set", PickleValue::set({1, 2})},
                                        {3, "three"}});
  for (const auto& object : {PickleValue(7), PickleValue(), PickleValue("x"), PickleValue::list({}), group}) {
    StringSink out;
    const auto length = write_object_record(object, out.sink());
    EXPECT_EQ(length, out.bytes.size());
    EXPECT_EQ(length, object_record_bytes(object));
    const auto record = TorchRecord::parse(bytes_of_text(out.bytes), "r");
    EXPECT_TRUE(is_same_pickle(record.root(), object)) << record.root().describe();
    EXPECT_EQ(record.tensor_count(), 0U);
  }
}

TEST(TorchSave, StateDictsKeepOrderAndTiesAndOutliveTheirFile) {
  TempFolder folder;
  const auto weight = pattern(at::kBFloat16, {64, 32}, 1), bias = pattern(at::kBool, {7}, 2);
  TorchSaveWriter writer;
  const auto leaf = writer.add(weight, {.requires_grad = true});
  const auto tied = writer.add(weight);
  const auto other = writer.add(weight.view(at::kShort));  // another dtype of the same storage is a copy
  write_torch_save(folder / "model.pt", writer,
                   PickleValue::dict({{"w", leaf},
                                      {"tied", tied},
                                      {"short", other},
                                      {"again", PickleValue::list({leaf})},
                                      {"b", writer.add(bias)}}));
  auto file = TorchSaveFile::open(folder / "model.pt");
  const auto& root = file->root();
  ASSERT_EQ(root.dict_size(), 5U);
  EXPECT_EQ(root.key(1).as_text(), "tied");
  const auto* w = file->find_tensor(*root.find("w"));
  const auto* t = file->find_tensor(*root.find("tied"));
  const auto* s = file->find_tensor(*root.find("short"));
  const auto* a = file->find_tensor(root.find("again")->items()[0]);
  ASSERT_TRUE(w && t && s && a);
  EXPECT_TRUE(w->requires_grad);
  EXPECT_FALSE(t->requires_grad);
  EXPECT_EQ(w->storage_begin, t->storage_begin);
  EXPECT_NE(w->storage_begin, s->storage_begin);
  EXPECT_EQ(file->find_tensor(root), nullptr);
  const auto read = file->tensor(*w), read_tied = file->tensor(*t),
             read_bool = file->tensor(*file->find_tensor(*root.find("b")));
  EXPECT_EQ(read.const_data_ptr(), read_tied.const_data_ptr());  // both point into the mapped file; there are no copies
  EXPECT_TRUE(same_tensor(file->tensor(*a), weight));
  file.reset();
  std::filesystem::remove(folder / "model.pt");
  EXPECT_TRUE(same_tensor(read, weight));
  EXPECT_TRUE(same_tensor(read_bool, bias));
}

TEST(TorchSave, UnalignedRecordsAreReadCorrectly) {
  // In a DCP file a record may begin at any byte.
  const auto tensor = pattern(at::kFloat, {11}, 5);
  StringSink out;
  write_tensor_record(tensor, out.sink());
  const auto keep = std::make_shared<const std::string>("x" + out.bytes);
  const auto record = bytes_of_text(*keep).subspan(1);
  const auto parsed = TorchRecord::parse(record, "r");
  EXPECT_TRUE(same_tensor(record_tensor(record, *parsed.find_tensor(parsed.root()), keep), tensor));
}

TEST(TorchSave, TensorsWithoutDenseBytesAreRefused) {
  TorchSaveWriter writer;
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { writer.add(at::Tensor()); }), HasSubstr("undefined"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { writer.add(at::empty({2}, at::device(at::kMeta))); }),
              HasSubstr("no bytes to save"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { writer.add(at::eye(2).to_sparse()); }), HasSubstr("no bytes to save"));
  EXPECT_THAT(
      error_of(ErrorKind::kFormat, [&] { writer.add(at::quantize_per_tensor(at::ones({2}), 1, 0, at::kQInt8)); }),
      HasSubstr("cannot be saved"));
}

// A record whose pickle is `root`. Its storage 0 has 16 bytes.
std::string record_with(const PickleValue& root, const std::string& byte_order = "little") {
  StringSink out;
  const auto sink = out.sink();
  ZipWriter zip(sink);
  zip.add("archive/data.pkl", bytes_of_text(pickle(root, {.protocol = 2})));
  zip.add("archive/byteorder", bytes_of_text(byte_order));
  zip.add("archive/data/0", bytes_of_text(std::string(16, '\x01')));
  zip.finish();
  return out.bytes;
}

struct TensorArgs {
  PickleValue storage_class = PickleValue::global("torch", "FloatStorage");
  PickleValue key = "0";
  PickleValue elements = 4;
  PickleValue offset = 0;
  PickleValue size = PickleValue::tuple({2, 2});
  PickleValue stride = PickleValue::tuple({2, 1});
  PickleValue grad = false;
  PickleValue hooks = PickleValue::ordered_dict({});
  std::vector<PickleValue> more = {};
  const char* function = "_rebuild_tensor_v2";
};

PickleValue tensor_value(const TensorArgs& from) {
  const auto storage =
      PickleValue::persistent(PickleValue::tuple({"storage", from.storage_class, from.key, "cuda:1", from.elements}));
  PickleValue::Items args{storage, from.offset, from.size, from.stride, from.grad, from.hooks};
  args.insert(args.end(), from.more.begin(), from.more.end());
  return PickleValue::call(PickleValue::global("torch._utils", from.function), args);
}

std::string tensor_refusal(const TensorArgs& args) {
  const auto record = record_with(PickleValue::list({tensor_value(args)}));
  return error_of(ErrorKind::kFormat, [&] { TorchRecord::parse(bytes_of_text(record), "r"); });
}

TEST(TorchSave, StridesOffsetsAndParametersAreRead) {
  const auto read = [](const PickleValue& root) { return tensor_of(record_with(root)); };
  const float one = std::bit_cast<float>(0x01010101);
  EXPECT_TRUE(at::equal(read(tensor_value({})), at::full({2, 2}, one)));
  EXPECT_EQ(read(tensor_value({.stride = PickleValue::tuple({1, 2})})).strides(), (at::IntArrayRef{1, 2}));
  const auto last = PickleValue::tuple({});
  EXPECT_EQ(read(tensor_value({.offset = 3, .size = last, .stride = last})).item<float>(), one);
  // An expanded tensor has its declared size without memory for all elements. The copy of an expanded bool tensor is
  // small, too.
  const auto wide = PickleValue::tuple({int64_t{1} << 40}), zero = PickleValue::tuple({0});
  EXPECT_EQ(read(tensor_value({.size = wide, .stride = zero})).numel(), int64_t{1} << 40);
  const auto flags = read(tensor_value(
      {.storage_class = PickleValue::global("torch", "BoolStorage"), .elements = 16, .size = wide, .stride = zero}));
  EXPECT_EQ(flags.numel(), int64_t{1} << 40);
  EXPECT_TRUE(flags[5].item<bool>());
  const auto untyped = tensor_value({.storage_class = PickleValue::global("torch.storage", "UntypedStorage"),
                                     .elements = 16,
                                     .more = {PickleValue::global("torch", "uint32")},
                                     .function = "_rebuild_tensor_v3"});
  EXPECT_EQ(read(untyped).scalar_type(), at::kUInt32);
  const auto parameter = PickleValue::call(PickleValue::global("torch._utils", "_rebuild_parameter"),
                                           {tensor_value({}), true, PickleValue::ordered_dict({})});
  const auto record = record_with(parameter);
  const auto parsed = TorchRecord::parse(bytes_of_text(record), "r");
  const auto* info = parsed.find_tensor(parsed.root());
  ASSERT_NE(info, nullptr);
  EXPECT_TRUE(info->is_parameter && info->requires_grad);
}

TEST(TorchSave, TensorsThatDoNotFitTheirStorageAreRefused) {
  const auto tuple = [](PickleValue::Items items) { return PickleValue::tuple(std::move(items)); };
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(tensor_refusal({.offset = 1}), HasSubstr("is not inside its storage of 4 elements"));
  EXPECT_THAT(tensor_refusal({.offset = -1}), HasSubstr("a tensor with storage offset -1"));
  EXPECT_THAT(tensor_refusal({.offset = huge}), HasSubstr("is not inside"));
  EXPECT_THAT(tensor_refusal({.size = tuple({3, 2})}), HasSubstr("is not inside"));
  EXPECT_THAT(tensor_refusal({.size = tuple({huge, huge}), .stride = tuple({0, 0})}), HasSubstr("is not inside"));
  EXPECT_THAT(tensor_refusal({.size = tuple({huge, 2}), .stride = tuple({huge, 1})}), HasSubstr("is not inside"));
  EXPECT_THAT(tensor_refusal({.offset = 5, .size = tuple({0}), .stride = tuple({1})}), HasSubstr("is not inside"));
  EXPECT_THAT(tensor_refusal({.size = tuple({-1, 2})}), HasSubstr("a tensor with a size of -1"));
  EXPECT_THAT(tensor_refusal({.stride = tuple({-2, 1})}), HasSubstr("a tensor with a stride of -2"));
  EXPECT_THAT(tensor_refusal({.stride = tuple({1})}), HasSubstr("2 sizes and 1 strides"));
  EXPECT_THAT(tensor_refusal({.size = "x"}), HasSubstr("whose size is 'x'"));
  EXPECT_THAT(tensor_refusal({.elements = 5}), HasSubstr("holds 16 bytes, wanted 5 elements of 4 bytes"));
  EXPECT_THAT(tensor_refusal({.elements = int64_t{1} << 62}), HasSubstr("holds 16 bytes"));
  EXPECT_THAT(tensor_refusal({.elements = -4}), HasSubstr("a storage whose id is"));
  EXPECT_THAT(tensor_refusal({.key = "1"}), HasSubstr("holds no 'archive/data/1'"));
  EXPECT_THAT(tensor_refusal({.storage_class = PickleValue::global("torch", "float32")}),
              HasSubstr("not a storage class"));
  EXPECT_THAT(tensor_refusal({.storage_class = PickleValue::global("torch.storage", "UntypedStorage")}),
              HasSubstr("over a torch.storage.UntypedStorage"));
  EXPECT_THAT(tensor_refusal({.grad = 1}), HasSubstr("requires_grad is 1"));
  EXPECT_THAT(tensor_refusal({.hooks = PickleValue::ordered_dict({{1, 2}})}), HasSubstr("backward hooks"));
  EXPECT_THAT(tensor_refusal({.more = {PickleValue::dict({{"conj", true}})}}), HasSubstr("the bit 'conj' set"));
  EXPECT_THAT(tensor_refusal({.more = {1, 2}}), HasSubstr("with 8 arguments, wanted 6"));
  EXPECT_THAT(tensor_refusal({.function = "_rebuild_tensor_v3"}), HasSubstr("with 6 arguments, wanted 7"));
}

TEST(TorchSave, ErrorsNameOtherFormats) {
  const auto refusal = [](const std::string& bytes) {
    return error_of(ErrorKind::kFormat, [&] { TorchRecord::parse(bytes_of_text(bytes), "r"); });
  };
  EXPECT_THAT(refusal("\x80\x02K."), HasSubstr("torch before 1.6"));
  EXPECT_THAT(refusal(""), HasSubstr("no zip archive"));
  EXPECT_THAT(refusal(record_with(1, "big")), HasSubstr("byte order 'big'"));
  StringSink out;
  const auto sink = out.sink();
  ZipWriter zip(sink);
  zip.add("model/constants.pkl", bytes_of_text("x"));
  zip.finish();
  EXPECT_THAT(refusal(out.bytes), HasSubstr("holds no 'model/data.pkl'"));
  EXPECT_EQ(error_of(ErrorKind::kIo, [] { TorchSaveFile::open("/nowhere.pt"); }).find("[torch_save]"),
            std::string::npos);
}

TEST(TorchSave, DamagedFilesAreReadOrRefused) {
  TempFolder folder;
  TorchSaveWriter writer;
  const auto leaf = writer.add(pattern(at::kFloat, {3}, 1));
  write_torch_save(folder / "good.pt", writer, PickleValue::dict({{"w", leaf}, {"n", 3}}));
  testing::expect_survives_damage(folder / "good.pt", folder / "bad.pt", 1500, [](const std::filesystem::path& path) {
    const auto file = TorchSaveFile::open(path);
    if (file->root().kind() != PickleKind::kDict) return;
    for (size_t i = 0; i < file->root().dict_size(); ++i) {
      if (const auto* info = file->find_tensor(file->root().value(i))) file->tensor(*info).clone();
    }
  });
}

}  // namespace
}  // namespace tessera
