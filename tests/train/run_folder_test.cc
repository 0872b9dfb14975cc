#include "tessera/train/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/train/recipe.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

std::vector<nlohmann::json> lines_of(const std::filesystem::path& file) {
  std::vector<nlohmann::json> lines;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

StepMetrics metrics_of(int64_t step) { return {.step = step, .loss = 2.5, .tokens = 64}; }

TEST(RunFolder, SecondRunIsToldWhoHoldsTheFolder) {
  testing::TempFolder temp;
  const RunFolder first(temp / "run");
  try {
    RunFolder second(temp / "run");
    FAIL() << "two runs on one folder";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    EXPECT_THAT(error.what(), HasSubstr(fmt::format("pid {} on {}", ::getpid(), host)));
    EXPECT_THAT(error.what(), HasSubstr((temp / "run").string()));
  }
}

TEST(RunFolder, LockEndsWithTheRunHoweverItEnds) {
  testing::TempFolder temp;
  { const RunFolder first(temp / "run"); }
  const pid_t child = ::fork();
  if (child == 0) {
    const RunFolder held(temp / "run");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_NO_THROW(RunFolder(temp / "run"));
}

TEST(RunFolder, FolderThatCannotBeIsAnIoError) {
  testing::TempFolder temp;
  publish_file(temp / "file", "x");
  for (const auto& path : {temp / "file", temp / "file" / "run"}) {
    try {
      RunFolder folder(path);
      FAIL() << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kIo);
      EXPECT_THAT(error.what(), HasSubstr(path.string()));
    }
  }
}

TEST(RunFolder, RecipeInTheFolderReadsBack) {
  testing::TempFolder temp;
  RunFolder folder(temp / "run");
  folder.write_recipe(parse_recipe("model: {path: m}\ndata: {train: a.txt}\ntrain: {steps: 17}", "my.yaml"));
  const Recipe again = read_recipe(temp / "run" / "recipe.yaml");
  EXPECT_EQ(again.train.steps, 17);
  EXPECT_EQ(again.checkpoint.dir, "runs/my");
}

TEST(RunFolder, MetricsHaveTheFieldsOfTheContract) {
  testing::TempFolder temp;
  RunFolder folder(temp / "run");
  folder.open_metrics(0);
  folder.append({.step = 1,
                 .loss = 2.25,
                 .grad_norm = 0.5,
                 .lr = 1e-4,
                 .tokens = 640,
                 .tokens_per_second = 320,
                 .memory_bytes = 1 << 30,
                 .peak_share = 0.25,
                 .seconds = 2});
  folder.append_validation(1, 2.125, 0.5);
  folder.append({.step = 2, .loss = NAN, .grad_norm = INFINITY});
  const auto lines = lines_of(temp / "run" / "metrics.jsonl");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0], nlohmann::json::parse(R"({"step":1,"loss":2.25,"grad_norm":0.5,"lr":1e-4,"tokens":640,
    "tokens_per_second":320.0,"memory_bytes":1073741824,"peak_share":0.25,"seconds":2.0})"));
  EXPECT_EQ(lines[1], nlohmann::json::parse(R"({"step":1,"validation_loss":2.125,"seconds":0.5})"));
  EXPECT_TRUE(lines[2]["loss"].is_null());
  EXPECT_TRUE(lines[2]["grad_norm"].is_null());
}

TEST(RunFolder, ResumeDropsLaterTornAndForeignLines) {
  testing::TempFolder temp;
  const auto file = temp / "run" / "metrics.jsonl";
  std::filesystem::create_directories(temp / "run");
  publish_file(file,
               "{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":2}\n{\"step\":2,\"validation_loss\":2}\nnoise\n[1]\n"
               "{\"step\":3,\"loss\":1}\n{\"step\":2,\"lo");
  RunFolder folder(temp / "run");
  folder.open_metrics(2);
  folder.append(metrics_of(3));
  const auto lines = lines_of(file);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[2].at("validation_loss"), 2);
  EXPECT_EQ(lines[3].at("loss"), 2.5);
}

TEST(RunFolder, StartFromStepZeroStartsMetricsAnew) {
  testing::TempFolder temp;
  std::filesystem::create_directories(temp / "run");
  publish_file(temp / "run" / "metrics.jsonl", "{\"step\":0,\"validation_loss\":3}\n{\"step\":1,\"loss\":3}\n");
  RunFolder folder(temp / "run");
  folder.open_metrics(0);
  EXPECT_TRUE(lines_of(temp / "run" / "metrics.jsonl").empty());
}

TEST(RunFolder, LineThatDoesNotFitLeavesTheFileWhole) {
  testing::TempFolder temp;
  const pid_t child = ::fork();
  if (child == 0) {  // the limit on file size is for the whole process
    int code = 1;
    try {
      RunFolder folder(temp / "run");
      folder.open_metrics(0);
      folder.append(metrics_of(1));
      const auto size = std::filesystem::file_size(temp / "run" / "metrics.jsonl");
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{size + 10, size + 10};
      ::setrlimit(RLIMIT_FSIZE, &limit);
      try {
        folder.append(metrics_of(2));
      } catch (const Error& error) {
        code = error.kind() == ErrorKind::kIo && std::filesystem::file_size(temp / "run" / "metrics.jsonl") == size ? 0
                                                                                                                    : 2;
      }
    } catch (...) {
      code = 3;
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace tessera::train
