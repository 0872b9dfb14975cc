// Tests of the folder of a run: its lock, recipe, metrics, earlier history and exported model.
#include "tessera/train/output/run_folder.h"

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
#include "tessera/base/files/file.h"
#include "tessera/train/recipe/recipe.h"
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

TEST(RunFolder, SecondRunReportsTheLockHolder) {
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

TEST(RunFolder, LockIsReleasedWhenTheProcessEnds) {
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

TEST(RunFolder, FolderThatCannotBeCreatedIsAnIoError) {
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

TEST(RunFolder, MetricsHaveTheDocumentedFields) {
  testing::TempFolder temp;
  RunFolder folder(temp / "run");
  folder.open_history(0);
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

TEST(RunFolder, ResumeDropsLaterTruncatedAndInvalidLines) {
  testing::TempFolder temp;
  const auto file = temp / "run" / "metrics.jsonl";
  RunFolder folder(temp / "run");
  publish_file(file,
               "{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":2}\n{\"step\":2,\"validation_loss\":2}\nnoise\n[1]\n"
               "{\"step\":3,\"loss\":1}\n{\"step\":2,\"lo");
  folder.open_history(2);
  folder.append(metrics_of(3));
  const auto lines = lines_of(file);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[2].at("validation_loss"), 2);
  EXPECT_EQ(lines[3].at("loss"), 2.5);
}

TEST(RunFolder, StartFromStepZeroArchivesEarlierMetrics) {
  testing::TempFolder temp;
  const std::string earlier = "{\"step\":0,\"validation_loss\":3}\n{\"step\":1,\"loss\":3}\n";
  RunFolder folder(temp / "run");
  publish_file(temp / "run" / "metrics.jsonl", earlier);
  folder.open_history(0);
  folder.append(metrics_of(1));
  EXPECT_EQ(lines_of(temp / "run" / "metrics.jsonl").size(), 1u);
  EXPECT_EQ(read_file(temp / "run" / "previous" / "001" / "metrics.jsonl"), earlier);
  folder.open_history(0);
  EXPECT_TRUE(lines_of(temp / "run" / "metrics.jsonl").empty());
  EXPECT_EQ(lines_of(temp / "run" / "previous" / "002" / "metrics.jsonl").size(), 1u);
}

// The message of the Error that the opening of the folder throws; the Error must be of this kind.
std::string refusal(const std::filesystem::path& path, ErrorKind kind) {
  try {
    RunFolder folder(path);
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.kind()), std::string(to_string(kind))) << error.what();
    return error.what();
  }
  ADD_FAILURE() << path << " was taken";
  return "";
}

TEST(RunFolder, FilesThatNoRunWroteAreNotChanged) {
  for (const char* name :
       {"recipe.yaml", "metrics.jsonl", "model/config.json", "checkpoints/step-00000001/manifest.json",
        "tensorboard/events", "previous/001/a", ".tessera/theirs"}) {
    testing::TempFolder temp;
    std::filesystem::create_directories((temp / name).parent_path());
    publish_file(temp / name, "theirs");
    EXPECT_THAT(refusal(temp.path(), ErrorKind::kConfig), HasSubstr("is in the way, and no run wrote it"));
    EXPECT_EQ(read_file(temp / name), "theirs");
    size_t files = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(temp.path())) {
      files += entry.is_regular_file();
    }
    EXPECT_EQ(files, 1u) << "something was written beside " << name;
  }
  testing::TempFolder temp;
  std::filesystem::create_directories(temp / ".tessera");
  const std::string start = R"({"format": "tessera.run", "version": 1, "id": "x", "own": )";
  for (const std::string& mark :
       {std::string("{}"), start + "[]}", start + R"({"model": [3]}})", start + std::string(100'000, '[')}) {
    publish_file(temp / ".tessera" / "run.json", mark);
    EXPECT_THAT(refusal(temp.path(), ErrorKind::kFormat), HasSubstr("is not the mark of a run"));
  }
}

TEST(RunFolder, OtherFilesAndEmptyFoldersAreAccepted) {
  testing::TempFolder temp;
  publish_file(temp / "log.txt", "x");
  std::filesystem::create_directory(temp / "checkpoints");
  { RunFolder folder(temp.path()); }
  RunFolder again(temp.path());
  EXPECT_EQ(read_file(temp / "log.txt"), "x");
}

TEST(RunFolder, EarlierHistoryIsArchivedCompletely) {
  testing::TempFolder temp;
  RunFolder folder(temp / "run");
  EXPECT_TRUE(folder.archive_history().empty());
  folder.write_recipe(parse_recipe("model: {path: m}\ndata: {train: a.txt}", "my.yaml"));
  folder.open_history(0);
  folder.append(metrics_of(1));
  std::filesystem::create_directories(folder.checkpoints() / "step-00000001");
  publish_file(folder.checkpoints() / "LATEST", "step-00000001");
  publish_file(temp / "run" / "log.txt", "x");
  const auto aside = folder.archive_history();
  EXPECT_EQ(aside, temp / "run" / "previous" / "001");
  for (const char* name : {"recipe.yaml", "metrics.jsonl", "checkpoints/LATEST", "checkpoints/step-00000001"}) {
    EXPECT_TRUE(std::filesystem::exists(aside / name)) << name;
    EXPECT_FALSE(std::filesystem::exists(temp / "run" / name)) << name;
  }
  EXPECT_EQ(read_file(temp / "run" / "log.txt"), "x");
  EXPECT_TRUE(folder.archive_history().empty());
}

TEST(RunFolder, EditedRecipeIsNotOverwritten) {
  testing::TempFolder temp;
  const auto recipe = parse_recipe("model: {path: m}\ndata: {train: a.txt}\ntrain: {steps: 17}", "my.yaml");
  const auto changed = parse_recipe("model: {path: m}\ndata: {train: a.txt}\ntrain: {steps: 18}", "my.yaml");
  { RunFolder(temp / "run").write_recipe(recipe); }
  RunFolder folder(temp / "run");
  folder.write_recipe(changed);  // a recipe that a run wrote is replaced
  EXPECT_EQ(read_recipe(temp / "run" / "recipe.yaml").train.steps, 18);
  EXPECT_FALSE(std::filesystem::exists(temp / "run" / "recipe.resolved.yaml"));
  publish_file(temp / "run" / "recipe.yaml", "# mine\n");
  folder.write_recipe(recipe);
  folder.write_recipe(changed);
  EXPECT_EQ(read_file(temp / "run" / "recipe.yaml"), "# mine\n");
  EXPECT_EQ(read_recipe(temp / "run" / "recipe.resolved.yaml").train.steps, 18);
  EXPECT_EQ(folder.archive_history(), temp / "run" / "previous" / "001");
  EXPECT_EQ(read_file(temp / "run" / "recipe.yaml"), "# mine\n");
}

std::filesystem::path staged_model(const RunFolder& folder, const std::string& content) {
  const auto fresh = folder.staging() / "model";
  std::filesystem::create_directories(fresh);
  publish_file(fresh / "config.json", content);
  return fresh;
}

TEST(RunFolder, OnlyAnUnchangedExportedModelIsReplaced) {
  testing::TempFolder temp;
  const auto config = temp / "run" / "model" / "config.json";
  {
    RunFolder folder(temp / "run");
    folder.check_model_replaceable();
    folder.publish_model(staged_model(folder, "first"));
    folder.publish_model(staged_model(folder, "second"));
    EXPECT_EQ(read_file(config), "second");
    EXPECT_TRUE(std::filesystem::is_empty(folder.staging()));
  }
  RunFolder folder(temp / "run");
  folder.check_model_replaceable();
  publish_file(temp / "run" / "model" / "mine.txt", "x");
  EXPECT_THROW(folder.check_model_replaceable(), Error);
  EXPECT_THROW(folder.publish_model(staged_model(folder, "third")), Error);
  EXPECT_EQ(read_file(config), "second");
  EXPECT_TRUE(folder.archive_history().empty());
  std::filesystem::remove(temp / "run" / "model" / "mine.txt");
  publish_file(config, "s3cond");  // the same size as before
  EXPECT_THROW(folder.check_model_replaceable(), Error);
  publish_file(config, "second");
  EXPECT_EQ(folder.archive_history(), temp / "run" / "previous" / "001");
  EXPECT_EQ(read_file(temp / "run" / "previous" / "001" / "model" / "config.json"), "second");
  publish_file(temp / "model", "x");
  std::filesystem::create_symlink(temp / "model", temp / "run" / "model");
  EXPECT_THROW(folder.check_model_replaceable(), Error);
}

// A run may be killed between the note of a new model's fingerprint and the rename. The folder then has the old or the
// new model.
TEST(RunFolder, InterruptedExportIsRecovered) {
  testing::TempFolder temp;
  {
    RunFolder folder(temp / "run");
    folder.publish_model(staged_model(folder, "first"));
    RunMark mark(temp / "run");
    mark.add_fingerprint("model", fingerprint_of(staged_model(folder, "second")));
  }
  RunFolder folder(temp / "run");
  EXPECT_TRUE(std::filesystem::is_empty(folder.staging()));
  folder.check_model_replaceable();
  folder.publish_model(staged_model(folder, "third"));
  EXPECT_EQ(read_file(temp / "run" / "model" / "config.json"), "third");
}

TEST(RunFolder, FailedAppendLeavesTheFileUnchanged) {
  testing::TempFolder temp;
  const pid_t child = ::fork();
  if (child == 0) {  // the limit on file size holds for the whole process
    int code = 1;
    try {
      RunFolder folder(temp / "run");
      folder.open_history(0);
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
