// Tests of our safetensors files against the safetensors Python package, in both directions.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::run_python;
using testing::TempFolder;

constexpr const char* kSafetensorsScript = "tests/formats/oracle/safetensors_oracle.py";

TEST(SafetensorsOracle, FilesOfTheSafetensorsPackageAreReadCorrectly) {
  TempFolder folder;
  const auto run = run_python(kSafetensorsScript, {"write", folder.path().string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto file = SafetensorsFile::open(folder / "theirs.safetensors");
  EXPECT_EQ(file->metadata().at("format"), "pt");
  ASSERT_EQ(file->entries().size(), 12U);
  // Every tensor of the script holds i % 2 at position i.
  for (const auto& [name, entry] : file->entries()) {
    EXPECT_EQ(entry.shape, (std::vector<int64_t>{3, 5})) << name;
    EXPECT_TRUE(at::equal(file->tensor(name).to(at::kInt), at::arange(15, at::kInt).remainder(2).view({3, 5}))) << name;
  }
}

TEST(SafetensorsOracle, TheSafetensorsPackageReadsOurFiles) {
  TempFolder folder;
  std::vector<SafetensorsSpec> specs;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    specs.push_back({std::string(safetensors_dtype_name(dtype)), dtype, {3, 5}});
  }
  SafetensorsFolderWriter writer(folder.path(), specs, {.max_shard_bytes = 100});
  for (const auto& spec : specs) writer.write(spec.name, at::arange(15).remainder(2).view({3, 5}).to(spec.dtype));
  writer.finish();
  const auto run = run_python(kSafetensorsScript, {"check", folder.path().string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "12 tensors equal\n");
}

}  // namespace
}  // namespace tessera
