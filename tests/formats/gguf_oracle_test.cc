// Tests of our GGUF code against the gguf Python package: decoding of its quantized blocks, reading of our files, and
// our Q8_0 encoding.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/formats/gguf/gguf.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tests/formats/file_bytes.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::run_python;
using testing::TempFolder;

constexpr const char* kGgufScript = "tests/formats/oracle/gguf_oracle.py";

// Bits are equal, or both values are NaN.
::testing::AssertionResult same_bits(const at::Tensor& ours, const at::Tensor& theirs) {
  if (ours.sizes() != theirs.sizes()) return ::testing::AssertionFailure() << "shapes differ";
  const auto same = ours.view(at::kInt).eq(theirs.view(at::kInt)).logical_or(ours.isnan().logical_and(theirs.isnan()));
  const auto wrong = same.logical_not().sum().item<int64_t>();
  if (wrong == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << wrong << " of " << ours.numel() << " values differ";
}

TEST(GgufOracle, EveryTypeDecodesBitwiseLikeTheGgufPackage) {
  TempFolder folder;
  const auto run = run_python(kGgufScript, {"blocks", folder.path().string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto file = GgufFile::open(folder / "blocks.gguf");
  const auto wanted = SafetensorsFolder::open(folder / "wanted.safetensors");
  EXPECT_EQ(file->find_string("text"), "\u00e9 \u2581");
  EXPECT_EQ(file->find_uint("general.alignment"), 64U);
  for (const auto* type : {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}) {
    ASSERT_TRUE(file->contains(type));
    EXPECT_EQ(file->tensor_info(type).type_name(), type);
    const auto ours = file->tensor(type).to(at::kFloat), theirs = wanted.tensor(type);
    EXPECT_GT(theirs.isfinite().sum().item<int64_t>(), theirs.numel() / 2) << type;
    EXPECT_TRUE(same_bits(ours, theirs)) << type;
    // Also tests the block decoder itself. For plain types tensor() does not use the decoder.
    const auto info = file->tensor_info(type);
    const auto bytes = read_file(folder / "blocks.gguf").substr(info.begin, info.end - info.begin);
    auto decoded = at::empty(info.shape, at::kFloat);
    dequantize(info.type, std::as_bytes(std::span(bytes)),
               {decoded.data_ptr<float>(), static_cast<size_t>(decoded.numel())});
    EXPECT_TRUE(same_bits(decoded, theirs)) << type;
  }
}

TEST(GgufOracle, TheGgufPackageReadsOurFilesAndQuantisesIdentically) {
  TempFolder folder;
  const auto values = at::randn({7, 96}).mul(at::randn({7, 1}).exp());
  values[2].zero_();
  values[3].fill_(-127.5);
  values[4][5] = 1e-30;
  SafetensorsWriter source(folder / "source.safetensors", {{"x", at::kFloat, {7, 96}}});
  source.write("x", values);
  source.finish();
  GgufWriter writer(folder / "ours.gguf");
  writer.set("general.architecture", std::string("llama"));
  writer.set("count", uint32_t{7});
  writer.set("small", -2.5F);
  writer.set("flag", true);
  writer.set("words", GgufArray{std::vector<std::string>{"a", "\u00e9"}});
  writer.set("types", GgufArray{std::vector<int32_t>{1, -1}});
  for (const auto type : {GgmlType::kF32, GgmlType::kF16, GgmlType::kBF16, GgmlType::kQ8_0}) {
    writer.announce(std::string(ggml_type_info(static_cast<uint32_t>(type))->name), type, {7, 96});
  }
  for (const auto* name : {"Q8_0", "F32", "BF16", "F16"}) writer.write(name, values);
  writer.finish();
  const auto run = run_python(kGgufScript, {"check", folder.path().string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "4 tensors equal\n");
}

}  // namespace
}  // namespace tessera
