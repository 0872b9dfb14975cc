// Tests of real and saved Llamas against transformers. The tiny models of every variant are in families_oracle_test.cc.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/models/generation/generate.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::asset;
using testing::here;
using testing::run_python;

// Five prompts as token ids. Tokenizers have their own tests, in tests/text.
std::vector<std::vector<int64_t>> prompts_of(const fs::path& dir) {
  const auto run = run_python("tests/models/oracle/prompts.py", {dir.string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return nlohmann::json::parse(run.out).get<std::vector<std::vector<int64_t>>>();
}

nlohmann::json ask_transformers(const fs::path& dir, nlohmann::json request, const fs::path& request_path) {
  publish_file(request_path, request.dump());
  const auto run =
      run_python("tests/models/oracle/generate.py", {dir.string(), request_path.string()}, {.timeout_seconds = 500});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return nlohmann::json::parse(run.out);
}

std::vector<std::vector<int64_t>> continue_greedily(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                                    const GenerationOptions& options) {
  std::vector<std::vector<int64_t>> out;
  for (const auto& prompt : prompts) out.push_back(generate(model, prompt, options));
  return out;
}

TEST(LlamaOracle, SmolLm2LogitsAndGreedyTextEqualTransformers) {
  testing::TempFolder folder;
  const auto dir = asset("smollm2");
  const auto prompts = prompts_of(dir);
  const auto model = from_pretrained(dir, at::kFloat, testing::test_device());
  const auto answer =
      ask_transformers(dir, {{"prompts", prompts}, {"max_new_tokens", 40}, {"logits_to", (folder / "logits").string()}},
                       folder / "request.json");
  const auto expected = SafetensorsFile::open(folder / "logits")->tensor("logits");
  {
    at::NoGradGuard no_grad;
    const auto found = model->logits({.tokens = here(at::tensor(prompts.front()).unsqueeze(0))});
    EXPECT_LT((found.cpu() - expected).abs().max().item<double>(), 2e-4);
  }
  auto options = GenerationOptions::from_folder(dir, model->config());
  options.max_new_tokens = 40;
  EXPECT_EQ(continue_greedily(*model, prompts, options),
            answer["continuations"].get<std::vector<std::vector<int64_t>>>());
}

TEST(LlamaOracle, SavedFolderGeneratesTheSameInTransformers) {
  testing::TempFolder folder;
  std::vector<std::vector<int64_t>> prompts = {{5, 6, 7}, {30, 1, 2, 9, 9}, {11}};
  for (const std::string changes :
       {"", R"("tie_word_embeddings": true, "attention_bias": true)",
        R"("architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 6)"}) {
    const auto dir = folder / std::to_string(changes.size());
    auto model = testing::tiny_model(changes);
    save_pretrained(*model, dir, {}, {.max_shard_bytes = 5000});
    const auto answer = ask_transformers(dir, {{"prompts", prompts}, {"max_new_tokens", 24}}, folder / "request.json");
    GenerationOptions options;
    options.max_new_tokens = 24;
    options.stop_tokens = model->config().eos_token_ids;
    EXPECT_EQ(continue_greedily(*model, prompts, options),
              answer["continuations"].get<std::vector<std::vector<int64_t>>>())
        << changes;
  }
}

}  // namespace
}  // namespace tessera
