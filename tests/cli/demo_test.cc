// scripts/demo.sh in a folder of its own, with a stub of the program that pretends to train and to answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

class Demo : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(folder_ / "scripts");
    fs::copy(source_folder() / "scripts/demo.sh", folder_ / "scripts/demo.sh");
    const auto dialogue = [](const std::string& question, const std::string& answer) {
      return R"({"messages":[{"role":"user","content":")" + question + R"("},{"role":"assistant","content":")" +
             answer + "\"}]}\n";
    };
    write(folder_ / "build/assets/text/dialogues.jsonl", dialogue("What is a cow?", "An animal."));
    write(folder_ / "build/assets/text/dialogues-held-out.jsonl",
          dialogue("Say something.", "No question.") + dialogue("Are you a robot?", "Yes, I am.") +
              dialogue("Are you a robot?", "Asked already.") + dialogue("What is \\\"tea\\\"?", "Escaped.") +
              dialogue("Do you eat?", "I use electricity.") + dialogue("Who are you?", "A program.") +
              dialogue("What comes fourth?", "Nothing."));
    write(folder_ / "program",
          "#!/bin/bash\n"
          "echo \"$*\" >>calls\n"
          "case $1 in\n"
          "generate) echo \"as $3 has learnt\" ;;\n"
          "train)\n"
          "  dir=${5#checkpoint.dir=}\n"
          "  mkdir -p $dir/.tessera $dir/model && echo {} >$dir/.tessera/run.json\n"
          "  printf '{\"step\":0,\"validation_loss\":2.0}\\n{\"step\":1,\"loss\":3}\\n"
          "{\"step\":36,\"validation_loss\":%s}\\n' ${LAST_LOSS:-1.0} >$dir/metrics.jsonl ;;\n"
          "esac\n");
    write(folder_ / "bin/date", "#!/bin/sh\necho 20261125-120000\n");
    for (const char* name : {"program", "bin/date"}) fs::permissions(folder_ / name, fs::perms::owner_all);
  }

  ProcessResult run(const std::string& last_loss = "1.0") {
    return run_process({(folder_ / "scripts/demo.sh").string()},
                       {.environment = {{"PATH", (folder_ / "bin").string() + ":" + std::getenv("PATH")},
                                        {"TESSERA_PROGRAM", (folder_ / "program").string()},
                                        {"TESSERA_DEMO_RUN", "runs/demo"},
                                        {"LAST_LOSS", last_loss}}});
  }

  std::vector<fs::path> put_aside() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder_ / "runs")) {
      if (entry.path().filename() != "demo") found.push_back(entry.path());
    }
    return found;
  }

  TempFolder folder_;
};

TEST_F(Demo, ShowsThreeHeldOutAnswersBeforeAndAfterTraining) {
  const auto demo = run();
  EXPECT_EQ(demo.exit_code, 0) << demo.err;
  const auto row = [](const std::string& question, const std::string& answer) {
    return "\n  question  " + question +
           "\n  before    as build/assets/smollm2 has learnt \n  after     as runs/demo/model has learnt \n  data     "
           " " +
           answer + "\n";
  };
  EXPECT_THAT(demo.out, HasSubstr(row("Are you a robot?", "Yes, I am.") + row("Do you eat?", "I use electricity.") +
                                  row("Who are you?", "A program.")));
  EXPECT_THAT(demo.out, Not(HasSubstr("fourth")));
  EXPECT_THAT(demo.out, HasSubstr("Held-out loss: 2.0000 before, 1.0000 after (-50.0 %)"));
  EXPECT_THAT(read_file(folder_ / "calls"),
              AllOf(HasSubstr("generate --model build/assets/smollm2 --chat --prompt Are you a robot? "),
                    HasSubstr("\ntrain recipes/demo.yaml --nproc 2 checkpoint.dir=runs/demo\n"),
                    HasSubstr("generate --model runs/demo/model --chat --prompt Who are you? ")));
}

TEST_F(Demo, FailsIfTheLossFallsByTooLittle) {
  const auto demo = run("1.85");
  EXPECT_EQ(demo.exit_code, 1);
  EXPECT_THAT(demo.err, HasSubstr("fell by less than 10 %"));
}

TEST_F(Demo, MovesAFolderThatIsNoRunAside) {
  write(folder_ / "runs/demo/thesis.txt", "of years");
  for (size_t time = 1; time <= 2; ++time) {  // twice in the same second
    const auto demo = run();
    EXPECT_EQ(demo.exit_code, 0) << demo.err;
    EXPECT_FALSE(fs::exists(folder_ / "runs/demo/thesis.txt"));
    const auto aside = put_aside();
    ASSERT_EQ(aside.size(), time);
    std::vector<std::string> texts;
    for (const auto& path : aside) {
      EXPECT_THAT(path.filename().string(), ::testing::StartsWith("demo-before-20261125-120000"));
      EXPECT_TRUE(fs::exists(path / "thesis.txt")) << path;
      texts.push_back(read_file(path / "thesis.txt"));
    }
    EXPECT_THAT(demo.out, HasSubstr("What was in runs/demo is now in runs/demo-before-"));
    EXPECT_THAT(texts, ::testing::Contains("of years"));
    fs::remove_all(folder_ / "runs/demo/.tessera");
    write(folder_ / "runs/demo/thesis.txt", "another");
  }
}

TEST_F(Demo, ContinuesAnEarlierRun) {
  write(folder_ / "runs/demo/.tessera/run.json", "{}");
  write(folder_ / "runs/demo/checkpoints/LATEST", "step-18");
  write(folder_ / "runs/demo/checkpoints/step-18/shard", "weights");
  write(folder_ / "runs/demo/notes.txt", "mine");
  const auto demo = run();
  EXPECT_EQ(demo.exit_code, 0) << demo.err;
  EXPECT_THAT(demo.out, HasSubstr("Going on with runs/demo, from step-18"));
  EXPECT_THAT(put_aside(), ElementsAre());
  EXPECT_EQ(read_file(folder_ / "runs/demo/checkpoints/step-18/shard"), "weights");
  EXPECT_EQ(read_file(folder_ / "runs/demo/notes.txt"), "mine");
}

}  // namespace
}  // namespace tessera::testing
