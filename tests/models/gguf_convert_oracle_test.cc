// GGUF conversion against transformers, tokenizers, and llama.cpp's own tokenizer vectors.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/formats/gguf.h"
#include "tessera/models/detail/gguf_tokenizer.h"
#include "tessera/models/gguf_convert.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::asset;
using testing::run_python;
using testing::TempFolder;

constexpr const char* kScript = "tests/models/oracle/gguf_convert_oracle.py";

TEST(GgufConvertOracle, SmolLm2EqualsWhatTransformersDecodesAndAnswers) {
  TempFolder folder;
  const auto gguf = asset("raw/SmolLM2-135M-Instruct.Q4_1.gguf");
  gguf_to_folder(gguf, folder / "model");
  const auto run = run_python(kScript, {"real", gguf.string(), (folder / "model").string()}, {.timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("tensors equal"), std::string::npos) << run.out;
}

TEST(GgufConvertOracle, EveryVariantKeepsItsLogitsThroughGgufAndBack) {
  for (const std::string name : {"plain", "biases", "llama3", "yarn", "linear"}) {
    SCOPED_TRACE(name);
    TempFolder folder;
    const auto dir = (folder / "hf").string(), gguf = (folder / "model.gguf").string(),
               back = (folder / "back").string();
    const auto made = run_python(kScript, {"make", dir, name});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    folder_to_gguf(dir, gguf, {.type = GgmlType::kF32});
    gguf_to_folder(gguf, back);
    const auto run = run_python(kScript, {"same", dir, gguf, back});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    const auto scaling =
        nlohmann::json::parse(run.out.substr(run.out.rfind('\n', run.out.size() - 2) + 1), nullptr, false);
    if (name == "plain" || name == "biases") {
      EXPECT_TRUE(scaling.is_null()) << run.out;
    } else {
      EXPECT_EQ(scaling.value("rope_type", ""), name) << run.out;
    }
  }
}

TEST(GgufConvertOracle, ConvertedTokenizersGiveTheIdsOfLlamaCpp) {
  for (const std::string name : {"llama-bpe", "llama-spm", "phi-3", "qwen2", "refact", "starcoder", "gpt-2"}) {
    SCOPED_TRACE(name);
    TempFolder folder;
    const auto file = GgufFile::open(asset("vocabularies/ggml-vocab-" + name + ".gguf"));
    detail::write_tokenizer_files(*file, folder.path(), 1 << 20, 4096);
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
