// Tests of the real Gemma-3-270m, converted from GGUF, against transformers. `./dev assets slow` downloads the model.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/generation/generate.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::asset;
using testing::run_python;
using Ids = std::vector<std::vector<int64_t>>;

TEST(Gemma3Slow, ConvertedTensorsEqualWhatTransformersDecodes) {
  const auto gguf = asset("raw/gemma-3-270m-q4_k_m.gguf");
  const auto run = run_python("tests/models/oracle/gguf_convert_oracle.py",
                              {"decoded", gguf.string(), asset("gemma3").string()}, {.timeout_seconds = 600});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "237 tensors equal\n");  // the tied lm_head is one of them
}

TEST(Gemma3Slow, ConvertedTokenizerGivesTheIdsOfTheOriginal) {
  const auto run = run_python("tests/models/oracle/same_tokenizers.py",
                              {asset("gemma3").string(), asset("tokenizers/gemma3").string()});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
}

TEST(Gemma3Slow, LogitsAndGreedyTextEqualTransformers) {
  testing::TempFolder folder;
  const auto dir = asset("gemma3");
  const auto listed = run_python("tests/models/oracle/prompts.py", {dir.string()});
  ASSERT_EQ(listed.exit_code, 0) << listed.err;
  const auto prompts = nlohmann::json::parse(listed.out).get<Ids>();
  publish_file(
      folder / "request.json",
      nlohmann::json{{"prompts", prompts}, {"max_new_tokens", 40}, {"logits_to", (folder / "logits").string()}}.dump());
  const auto run = run_python("tests/models/oracle/generate.py", {dir.string(), (folder / "request.json").string()},
                              {.timeout_seconds = 900});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto model = from_pretrained(dir, at::kFloat, testing::test_device());
  {
    at::NoGradGuard no_grad;
    const auto found = model->logits({.tokens = testing::here(at::tensor(prompts.front()).unsqueeze(0))});
    const auto wanted = SafetensorsFile::open(folder / "logits")->tensor("logits");
    EXPECT_LT((found.cpu() - wanted).abs().max().item<double>(), 2e-4);
  }
  auto options = GenerationOptions::from_folder(dir, model->config());
  options.max_new_tokens = 40;
  Ids continuations;
  for (const auto& prompt : prompts) continuations.push_back(generate(*model, prompt, options));
  EXPECT_EQ(continuations, nlohmann::json::parse(run.out)["continuations"].get<Ids>());
}

}  // namespace
}  // namespace tessera
