// Models by their Hub name: every verb finds them in the Hub's local cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/process.h"
#include "tests/train/tiny_run.h"

namespace tessera::cli {
namespace {

using tessera::testing::program;
using tessera::testing::run_process;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ModelNames, VerbsAcceptTheNameOfAModelInTheHubCache) {
  const train::TinyRun runs;
  const auto model = runs / "home/hub/models--acme--tiny";
  std::filesystem::create_directories(model / "refs");
  std::ofstream(model / "refs/main") << "0123abc";
  std::filesystem::create_directories(model / "snapshots");
  std::filesystem::create_directory_symlink(runs / "base", model / "snapshots/0123abc");
  const std::map<std::string, std::string> environment = {{"HF_HOME", (runs / "home").string()}};
  const auto ids =
      run_process({program(), "tokenize", "--model", "acme/tiny"}, {.input = "ab\n", .environment = environment});
  EXPECT_EQ(ids.exit_code, 0) << ids.err;
  EXPECT_EQ(ids.out, "97 98\n");
  const auto check = run_process({program(), "train", (runs / "recipe.yaml").string(), "--check",
                                  "model.path=acme/tiny", "checkpoint.dir=" + (runs / "run").string()},
                                 {.environment = environment});
  EXPECT_EQ(check.exit_code, 0) << check.err;
  EXPECT_THAT(check.err, HasSubstr("model.path: acme/tiny is " + (model / "snapshots/0123abc").string()));
  EXPECT_THAT(check.out, HasSubstr("LlamaForCausalLM of acme/tiny, "));
  for (const char* verb : {"generate", "score"}) {
    std::vector<std::string> command = {program(), verb, "--model", "acme/none"};
    for (const char* word : {"--prompt", "a"}) {
      if (std::string(verb) == "generate") command.emplace_back(word);
    }
    for (const char* word : {"--input", "none.jsonl", "--output", "none.out"}) {
      if (std::string(verb) == "score") command.emplace_back(word);
    }
    const auto none = run_process(command, {.environment = environment});
    EXPECT_EQ(none.exit_code, 2) << verb;
    EXPECT_THAT(none.err, AllOf(HasSubstr("--model: 'acme/none'"), HasSubstr("hf download acme/none"))) << verb;
  }
}

// Files that a user may share contain the model's Hub name, and no path of this machine.
TEST(ModelNames, RunsKeepTheHubName) {
  const train::TinyRun runs;
  const auto model = runs / "home/hub/models--acme--tiny";
  std::filesystem::create_directories(model / "refs");
  std::ofstream(model / "refs/v2") << "0123abc";
  std::filesystem::create_directories(model / "snapshots");
  std::filesystem::create_directory_symlink(runs / "base", model / "snapshots/0123abc");
  const testing::ProcessOptions options{.environment = {{"HF_HOME", (runs / "home").string()}}};
  const std::vector<std::string> settings = {"model.path=acme/tiny@v2", "train.steps=2", "lora.rank=2"};
  const auto run = run_process(runs.command("a", 1, settings), options);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto adapter = nlohmann::json::parse(read_file(runs / "a/model/adapter_config.json"));
  EXPECT_EQ(adapter.at("base_model_name_or_path"), "acme/tiny");
  EXPECT_EQ(adapter.at("revision"), "v2");
  EXPECT_THAT(read_file(runs / "a/recipe.yaml"), HasSubstr("path: \"acme/tiny@v2\""));
  for (const char* name : {"recipe.yaml", "model/adapter_config.json", "events.jsonl"}) {
    EXPECT_THAT(read_file(runs / "a" / name), Not(HasSubstr("snapshots"))) << name;
  }
  // A run can be started from the saved recipe, and a checkpoint finds its model by the Hub name.
  auto again = runs.command("b", 1, {});
  again[2] = (runs / "a/recipe.yaml").string();
  const auto second = run_process(again, options);
  ASSERT_EQ(second.exit_code, 0) << second.err;
  const auto resumed = run_process(runs.command("a", 1, {settings[0], "train.steps=3", settings[2]}), options);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("settings changed since: train.steps 3 (was 2)\n"));
  ASSERT_EQ(run_process(runs.command("c", 1, {settings[0], "train.steps=2"}), options).exit_code, 0);
  const auto from = run_process(
      runs.command("d", 1, {"model.path=" + (runs / "c").string(), "model.init=pretrained", "train.steps=2"}), options);
  ASSERT_EQ(from.exit_code, 0) << from.err;
  const auto recipe = read_file(runs / "d/recipe.yaml");
  EXPECT_THAT(recipe, AllOf(HasSubstr("path: \"acme/tiny@v2\""), HasSubstr("c/checkpoints/step-00000002")));
  const auto gone = run_process(
      runs.command("e", 1, {"model.path=" + (runs / "c").string(), "model.init=pretrained", "train.steps=2"}),
      {.environment = {{"HF_HOME", (runs / "elsewhere").string()}}});
  EXPECT_EQ(gone.exit_code, 2);
  EXPECT_THAT(gone.err, HasSubstr("hf download acme/tiny --revision v2"));
}

}  // namespace
}  // namespace tessera::cli
