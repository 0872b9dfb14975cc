// `tessera generate` as a user runs it, on a tiny random model.
#include "tessera/models/generate.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/file.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::ProcessResult;

class Generate : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = testing::tiny_model();
    save_pretrained(*model_, dir(), {});
    publish_file(dir() / "tokenizer.json", testing::character_tokenizer("abcdefghijklmnopqrstuvwxyz .,:;!?()'-"));
  }
  std::filesystem::path dir() const { return folder_ / "model"; }
  ProcessResult run(std::vector<std::string> more) const {
    std::vector<std::string> all = {testing::program(), "generate", "--model", dir().string()};
    all.insert(all.end(), more.begin(), more.end());
    return testing::run_process(all, {.input = "the cat"});
  }
  testing::TempFolder folder_;
  std::shared_ptr<CausalLM> model_;
};

TEST_F(Generate, JsonHoldsPromptTokensAndText) {
  const auto found = run({"--prompt", "the cat", "--max-new-tokens", "9", "--json"});
  ASSERT_EQ(found.exit_code, 0) << found.err;
  const auto object = nlohmann::json::parse(found.out);
  const std::vector<int64_t> prompt = {19, 7, 4, 26, 2, 0, 19};
  EXPECT_EQ(object["prompt_tokens"], prompt);
  GenerationOptions options;
  options.max_new_tokens = 9;
  options.stop_tokens = {2, 3};
  EXPECT_EQ(object["tokens"], generate(*model_, prompt, options));
  EXPECT_EQ(object["text"].get<std::string>().size(), object["tokens"].size()) << "one character a token";
}

TEST_F(Generate, StreamedTextAndStandardInputGiveTheSameText) {
  const auto object = nlohmann::json::parse(run({"--prompt", "the cat", "--max-new-tokens", "9", "--json"}).out);
  EXPECT_EQ(run({"--prompt", "-", "--max-new-tokens", "9"}).out, object["text"].get<std::string>() + "\n");
}

TEST_F(Generate, SeedRepeatsAndTemperatureZeroIsGreedy) {
  const auto sampled = run({"--prompt", "a", "--temperature", "1.5", "--seed", "4"});
  EXPECT_EQ(sampled.exit_code, 0) << sampled.err;
  EXPECT_EQ(run({"--prompt", "a", "--temperature", "1.5", "--seed", "4"}).out, sampled.out);
  EXPECT_EQ(run({"--prompt", "a", "--temperature", "0"}).out, run({"--prompt", "a"}).out);
}

TEST_F(Generate, ShardedOverRanksItGivesTheSameTextOnce) {
  const auto one = run({"--prompt", "the cat", "--max-new-tokens", "9", "--json"});
  for (const char* ranks : {"2", "3"}) {
    const auto several = run({"--prompt", "the cat", "--max-new-tokens", "9", "--json", "--nproc", ranks});
    ASSERT_EQ(several.exit_code, 0) << several.err;
    EXPECT_EQ(several.out, one.out);
  }
  const auto text = nlohmann::json::parse(one.out)["text"].get<std::string>();
  EXPECT_EQ(run({"--prompt", "-", "--max-new-tokens", "9", "--nproc", "2"}).out, text + "\n");
  const std::vector<std::string> sample = {"--prompt", "a", "--temperature", "1.5", "--seed", "4"};
  auto on_two = sample;
  on_two.insert(on_two.end(), {"--nproc", "2"});
  EXPECT_EQ(run(on_two).out, run(sample).out);
}

TEST_F(Generate, ChatPutsThePromptIntoTheTemplate) {
  publish_file(
      dir() / "chat_template.jinja",
      "{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}");
  const auto found = run({"--prompt", "hi", "--chat", "--json", "--max-new-tokens", "2"});
  ASSERT_EQ(found.exit_code, 0) << found.err;
  EXPECT_EQ(nlohmann::json::parse(found.out)["prompt_tokens"].size(), std::string("(user) hi: ").size());
}

TEST_F(Generate, MistakesEndWithTheirExitCodeAndOneLine) {
  const auto expect = [](const ProcessResult& result, int code, const std::string& part) {
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_EQ(result.out, "");
  };
  expect(run({"--prompt", "a", "--nproc", "-1"}), 2, "wanted 1 to 4096");
  expect(run({"--prompt", "a", "--nproc", "0"}), 2, "wanted 1 to 4096");
  expect(run({"--prompt", "", "--nproc", "2"}), 2, "holds no token");
  expect(run({"--prompt", "a", "--top-p", "2"}), 2, "top_p");
  expect(run({"--prompt", ""}), 2, "holds no token");
  expect(run({"--prompt", "a", "--chat"}), 2, "no chat template");
  expect(run({"--prompt", "a", "--dtype", "int3"}), 2, "int3");
  expect(run({"--prompt", std::string(64, 'a')}), 2, "context is 64");
  std::filesystem::resize_file(dir() / "model.safetensors", 2000);
  expect(run({"--prompt", "a"}), 3, "cut off");
  std::filesystem::remove(dir() / "config.json");
  expect(run({"--prompt", "a"}), 3, "config.json");
}

}  // namespace
}  // namespace tessera
