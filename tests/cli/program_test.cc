#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/support/process.h"

namespace tessera {
namespace {

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
  EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
}

TEST(Program, HelpListsEveryVerbOnStdout) {
  const auto run = run_process({program(), "--help"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_THAT(run.err, IsEmpty());
  for (const char* verb : {"train", "generate", "score", "ckpt", "plan", "launch", "trace", "tokenize", "doctor"}) {
    EXPECT_THAT(run.out, HasSubstr(std::string("\n  ") + verb + " ")) << verb;
  }
}

TEST(Program, NoVerbIsAUsageErrorThatShowsTheHelp) {
  const auto run = run_process({program()});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.out, IsEmpty());
  EXPECT_THAT(run.err, HasSubstr("Usage: tessera VERB"));
}

TEST(Program, VersionIsThatOfTheProject) {
  const auto run = run_process({program(), "--version"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_THAT(run.out, ::testing::MatchesRegex("tessera [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST(Program, UnknownVerbNamesTheNearest) {
  const auto run = run_process({program(), "trian", "x.yaml"});
  expect_one_line_error(run, 2);
  EXPECT_THAT(run.err, HasSubstr("unknown verb 'trian'. Did you mean 'train'?"));
}

TEST(Program, EveryVerbPrintsItsHelp) {
  for (const char* verb : {"train", "generate", "score", "ckpt", "plan", "launch", "trace", "tokenize", "doctor"}) {
    const auto run = run_process({program(), verb, "--help"});
    EXPECT_EQ(run.exit_code, 0) << verb << run.err;
    EXPECT_THAT(run.out, HasSubstr(std::string("tessera ") + verb)) << verb;
    EXPECT_THAT(run.out, HasSubstr("--log-level")) << verb;
  }
}

TEST(Program, VerbsThatAreNotBuiltSaySo) {
  for (const char* verb : {"score", "plan"}) {
    const auto run = run_process({program(), verb, "--world", "8"});
    expect_one_line_error(run, 2);
    EXPECT_THAT(run.err, HasSubstr("not available in this version")) << verb;
  }
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

TEST(Program, ResultThatCannotBeWrittenIsAFailure) {
  const auto run = run_process({"sh", "-c", program() + " --version > /dev/full"});
  expect_one_line_error(run, 3);
  EXPECT_THAT(run.err, HasSubstr("standard output"));
}

}  // namespace
}  // namespace tessera
