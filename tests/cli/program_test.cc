// The program itself: help, version, usage errors and exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>

#include "tessera/base/error.h"
#include "tessera/cli/verbs.h"
#include "tests/support/process.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::program;
using testing::run_process;
using ::testing::StartsWith;

void expect_one_line_error(const testing::ProcessResult& run, int exit_code) {
  EXPECT_EQ(run.exit_code, exit_code) << run.err;
  EXPECT_THAT(run.err, StartsWith("tessera: error: ["));
  EXPECT_THAT(run.err, EndsWith("\n"));
  EXPECT_EQ(std::ranges::count(run.err, '\n'), 1) << run.err;
}

TEST(Program, HelpListsEveryVerbOnStdout) {
  const auto run = run_process({program(), "--help"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_THAT(run.err, IsEmpty());
  for (const auto& verb : cli::verbs()) EXPECT_THAT(run.out, HasSubstr(std::string("\n  ") + verb.name + " "));
  for (const char* absent : {"plan", "reshard"}) EXPECT_THAT(run.out, Not(HasSubstr(absent)));
}

TEST(Program, RecipesThatTheHelpNamesExist) {
  const auto run = run_process({program(), "--help"});
  size_t recipes = 0;
  for (size_t at = run.out.find("recipes/"); at != std::string::npos; at = run.out.find("recipes/", at + 1)) {
    const auto path = run.out.substr(at, run.out.find(' ', at) - at);
    EXPECT_TRUE(std::filesystem::exists(std::filesystem::path(std::getenv("TESSERA_SOURCE")) / path)) << path;
    ++recipes;
  }
  EXPECT_GT(recipes, 0u);
}

TEST(Program, TheFileExtensionOfAReportMustMatchItsFormat) {
  const auto picture = run_process({program(), "report", "runs/none", "--png", "-o", "page.html"});
  expect_one_line_error(picture, 2);
  EXPECT_THAT(picture.err, HasSubstr("a name that ends in .png"));
  const auto page = run_process({program(), "report", "runs/none", "-o", "page.png"});
  expect_one_line_error(page, 2);
  EXPECT_THAT(page.err, HasSubstr("the name of a picture"));
  for (const std::vector<std::string>& png : {std::vector<std::string>{"--png", "a.png"}, {"--png=a.png"}}) {
    std::vector<std::string> command = {program(), "report", "runs/none"};
    command.insert(command.end(), png.begin(), png.end());
    const auto run = run_process(command);
    expect_one_line_error(run, 2);
    EXPECT_THAT(run.err, HasSubstr("runs/none")) << "a.png is where the picture goes, no run";
    command.insert(command.end(), {"-o", "b.png"});
    expect_one_line_error(run_process(command), 2);
  }
  const auto other = run_process({program(), "report", "runs/none", "--png=a.html"});
  expect_one_line_error(other, 2);
  EXPECT_THAT(other.err, HasSubstr("a name that ends in .png"));
}

TEST(Program, NoVerbIsAUsageErrorThatShowsTheHelp) {
  const auto run = run_process({program()});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.out, IsEmpty());
  EXPECT_THAT(run.err, HasSubstr("Usage: tessera VERB"));
}

TEST(Program, PrintsTheVersionOfTheProject) {
  for (const char* word : {"--version", "version"}) {
    const auto run = run_process({program(), word});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_THAT(run.out, ::testing::MatchesRegex("tessera [0-9]+\\.[0-9]+\\.[0-9]+\n"));
  }
}

TEST(Program, UnknownVerbNamesTheNearest) {
  const auto run = run_process({program(), "trian", "x.yaml"});
  expect_one_line_error(run, 2);
  EXPECT_THAT(run.err, HasSubstr("unknown verb 'trian'. Did you mean 'train'?"));
  const auto far = run_process({program(), "pla\x1b[31m"});
  expect_one_line_error(far, 2);
  EXPECT_THAT(far.err, AllOf(HasSubstr("unknown verb 'pla\\x1b[31m'. See"), Not(HasSubstr("Did you mean"))));
}

TEST(Program, EveryVerbPrintsItsHelp) {
  for (const char* verb :
       {"train", "generate", "serve", "score", "report", "ckpt", "launch", "trace", "tokenize", "doctor"}) {
    const auto run = run_process({program(), verb, "--help"});
    EXPECT_EQ(run.exit_code, 0) << verb << run.err;
    EXPECT_THAT(run.out, HasSubstr(std::string("tessera ") + verb)) << verb;
    EXPECT_THAT(run.out, HasSubstr("--log-level LEVEL [info]")) << verb;
    for (const char* jargon : {"REQUIRED", "INT", "FLOAT", "TEXT="}) {
      EXPECT_THAT(run.out, Not(HasSubstr(jargon))) << verb;
    }
  }
}

TEST(Program, HelpNamesPositionalArgumentsWithoutTheirTypes) {
  const auto run = run_process({program(), "ckpt", "ls", "--help"});
  EXPECT_THAT(run.out, AllOf(HasSubstr("\n  PATH    "), HasSubstr("a run's folder"), Not(HasSubstr("TEXT")),
                             Not(HasSubstr("REQUIRED"))));
}

TEST(Program, OutOfMemoryIsExplained) {
  EXPECT_THAT(cli::message_of(std::bad_alloc()), AllOf(HasSubstr("out of memory"), HasSubstr("smaller batches")));
  EXPECT_EQ(cli::message_of(Error(ErrorKind::kIo, "[x] y")), "[x] y");
}

TEST(Program, UnknownFlagNamesTheNearest) {
  const auto run = run_process({program(), "doctor", "--jsom"});
  expect_one_line_error(run, 2);
  EXPECT_THAT(run.err, HasSubstr("[tessera doctor] unknown flag '--jsom'. Did you mean '--json'?"));
}

TEST(Program, WrongLogLevelIsAUsageError) {
  const auto run = run_process({program(), "doctor", "--log-level", "loud"});
  expect_one_line_error(run, 2);
  EXPECT_THAT(run.err, HasSubstr("'loud'"));
}

TEST(Program, OutputThatCannotBeWrittenIsAFailure) {
  const auto run = run_process({"sh", "-c", program() + " --version > /dev/full"});
  expect_one_line_error(run, 3);
  EXPECT_THAT(run.err, HasSubstr("standard output"));
}

}  // namespace
}  // namespace tessera
