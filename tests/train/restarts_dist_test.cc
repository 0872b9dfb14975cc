// Tests of runs whose launcher starts the ranks again.
#include "tests/support/free_port.h"
#include "tests/train/restarts.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

std::vector<nlohmann::json> restarts_of(const TinyRun& runs, const std::string& dir) {
  std::vector<nlohmann::json> found;
  std::ifstream lines(runs / dir / "events.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("restart")) found.push_back(json);
  }
  return found;
}

TEST(Restarts, RunSurvivesKilledRanksBitwise) { expect_run_survives_kills(3, 3, std::random_device{}(), 6); }

// One rank is killed at a known place. The log, the events and the report must contain the reason.
TEST(Restarts, ReasonIsInLogAndEvents) {
  const TinyRun runs;
  std::filesystem::create_directory(runs / "tmp");
  auto command = runs.command("a", 2, {"checkpoint.every=1", "train.steps=60"});
  command.insert(command.end(), {"--max-restarts", "1"});
  Processes processes(command, runs / "tmp", runs / "log");
  while (!std::filesystem::exists(runs / "a/checkpoints/LATEST") && !processes.ended()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const auto& [pid, role] : processes.alive()) {
    if (role != "rank") continue;
    ::kill(pid, SIGKILL);
    break;
  }
  ASSERT_EQ(processes.wait(), 0) << read_file(runs / "log");
  EXPECT_THAT(read_file(runs / "log"), HasSubstr("[launch] restart 1: rank "));
  const auto restarts = restarts_of(runs, "a");
  ASSERT_EQ(restarts.size(), 1u);
  EXPECT_GE(restarts[0]["step"].get<int64_t>(), 1);
  EXPECT_EQ(restarts[0]["restart"]["attempt"], 1);
  EXPECT_THAT(restarts[0]["restart"]["reason"].get<std::string>(), HasSubstr("ended by signal 9 (Killed)"));
  const auto page =
      testing::run_process({testing::program(), "report", (runs / "a").string(), "-o", (runs / "a.html").string()});
  if (page.exit_code == 0) {  // otherwise this build has no charts
    EXPECT_THAT(read_file(runs / "a.html"), HasSubstr("restart 1: rank "));
  }
}

// A recipe that always fails is tried twice, not --max-restarts times.
TEST(Restarts, SameFailureTwiceBeforeTheFirstStepEndsTheRun) {
  const TinyRun runs;
  const auto run = runs.train("a", 2, {"data.train=[" + (runs / "none.jsonl").string() + "]", "--max-restarts", "9"});
  EXPECT_NE(run.exit_code, 0);
  EXPECT_THAT(run.err, HasSubstr("no restart: the same failure twice before its first step"));
  EXPECT_EQ(run.err.find("restart 2"), run.err.npos) << run.err;
}

// Under srun, torchrun or 'tessera launch' the flag has no effect, so a user must not rely on it.
TEST(Restarts, FlagWithoutEffectIsReported) {
  const TinyRun runs;
  auto command = runs.command("a", 1, {"train.steps=2"});
  command.insert(command.end(), {"--max-restarts", "3"});
  const auto run =
      testing::run_process(command, {.environment = {{"RANK", "0"},
                                                     {"WORLD_SIZE", "1"},
                                                     {"LOCAL_RANK", "0"},
                                                     {"LOCAL_WORLD_SIZE", "1"},
                                                     {"MASTER_ADDR", "127.0.0.1"},
                                                     {"MASTER_PORT", std::to_string(testing::free_port())}}});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("--max-restarts 3: has no effect, because torchrun started this rank"));
  command.insert(command.begin(), {testing::program(), "launch", "--nproc", "2", "--"});
  const auto launched = testing::run_process(command);
  EXPECT_EQ(launched.exit_code, 0) << launched.err;
  EXPECT_THAT(launched.err, HasSubstr("because 'tessera launch' started this rank"));
  EXPECT_EQ(launched.err.find("has no effect"), launched.err.rfind("has no effect")) << "told once";
}

}  // namespace
}  // namespace tessera::train
