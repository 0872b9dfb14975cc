// Recipes through the program. A wrong recipe gives exit code 2 and one line with the place and the error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::program;
using testing::run_process;
using ::testing::StartsWith;

struct WrongRecipe {
  std::string name, yaml;
  std::vector<std::string> overrides;
  std::string message;
};

TEST(TrainVerb, InvalidRecipesExitWithTwoAndOneLine) {
  testing::TempFolder folder;
  const std::string fine = "model: {path: m}\ndata: {train: a.txt}\n";
  std::string bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n";
  for (int i = 1; i < 12; ++i) {
    const auto alias = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + alias;
    for (int j = 1; j < 10; ++j) bomb += "," + alias;
    bomb += "]\n";
  }
  const std::vector<WrongRecipe> cases = {
      {"unknown-key", fine + "train: {step: 5}\n", {}, ":3: unknown key 'train.step'. Did you mean 'train.steps'?"},
      {"wrong-type", fine + "optimizer: {lr: fast}\n", {}, ":3: optimizer.lr: found 'fast', wanted number >= 0"},
      {"wrong-range", fine, {"schedule.min_lr_ratio=2"}, "schedule.min_lr_ratio: found '2', wanted number in [0, 1]"},
      {"lora-without", fine, {"model.lora.merge=true"}, "model.lora.merge: found true without adapters"},
      {"lora-twice", fine, {"lora.rank=2", "lora.double_quant=true"}, "model.lora.double_quant: found true with"},
      {"missing", "model: {path: m}\n", {}, "data.train is missing"},
      {"bomb", bomb, {}, "once its aliases are expanded"},
      {"deep", std::string(200000, '['), {}, "nested deeper than 16 levels"},
      {"torn", fine + "train: {steps: 5", {}, "not YAML"},
      {"large", std::string(2 << 20, '#'), {}, "1048576"},
      {"batch", fine, {"train.global_batch_size=7"}, "wanted a multiple of train.local_batch_size"},
  };
  for (const auto& wrong : cases) {
    const auto path = folder / (wrong.name + ".yaml");
    publish_file(path, wrong.yaml);
    std::vector<std::string> command = {program(), "train", path.string(), "--print-config"};
    command.insert(command.end(), wrong.overrides.begin(), wrong.overrides.end());
    const auto run = run_process(command);
    EXPECT_EQ(run.exit_code, 2) << wrong.name << run.err;
    EXPECT_THAT(run.out, IsEmpty()) << wrong.name;
    EXPECT_THAT(run.err, AllOf(StartsWith("tessera: error: ["), HasSubstr(wrong.message), EndsWith("\n")));
    EXPECT_EQ(std::ranges::count(run.err, '\n'), 1) << run.err;
  }
  const auto missing = run_process({program(), "train", (folder / "none.yaml").string()});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.err, HasSubstr("no such file"));
}

TEST(TrainVerb, PrintedConfigIsTheResolvedRecipe) {
  testing::TempFolder folder;
  publish_file(folder / "my.yaml", "model: {path: m}\ndata: {train: a.txt}\n");
  const auto first =
      run_process({program(), "train", (folder / "my.yaml").string(), "--print-config", "train.steps=7"});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.out, AllOf(HasSubstr("  steps: 7 "), HasSubstr("  dir: runs/my ")));
  publish_file(folder / "my.yaml", first.out);
  const auto second = run_process({program(), "train", (folder / "my.yaml").string(), "--print-config"});
  EXPECT_EQ(second.out, first.out);
}

TEST(TrainVerb, HelpAndDocsMatchTheRecipeTable) {
  const auto help = run_process({program(), "train", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("--print-config"), HasSubstr("optimizer.lr=0.0001")));
  const auto docs = run_process({program(), "train", "--recipe-docs"});
  EXPECT_EQ(docs.out, read_file(testing::source_folder() / "docs" / "recipe.md"));
}

}  // namespace
}  // namespace tessera
