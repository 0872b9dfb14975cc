// Models by name: every verb finds them in the Hub's local cache.
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

TEST(ModelNames, VerbsTakeTheNameOfAModelInTheHubsCache) {
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

}  // namespace
}  // namespace tessera::cli
