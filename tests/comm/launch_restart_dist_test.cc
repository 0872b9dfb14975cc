// Restarts by the launcher, the files and the display of the ranks' output, and the cores that ranks are bound to. The
// ranks are shell scripts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <future>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/machine/host.h"
#include "tessera/comm/launch/launcher.h"
#include "tests/support/free_port.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_process;
using ::testing::StartsWith;
using testing::TempFolder;

struct Outcome {
  int code = -1;
  std::string err, out;
};

// Runs `tessera launch FLAGS -- sh -c SCRIPT`.
Outcome launch(std::vector<std::string> flags, const std::string& script,
               const std::map<std::string, std::string>& environment = {}) {
  flags.insert(flags.begin(), {testing::program(), "launch"});
  flags.insert(flags.end(), {"--", "sh", "-c", script});
  const auto run = run_process(flags, {.environment = environment});
  return {run.exit_code, run.err, run.out};
}

// Part of a script: waits until all ranks of the attempt are here. The output that other ranks have written before is
// then complete when a rank fails, even on a slow machine. `folder` must belong to this run only.
std::string meet(const fs::path& folder, int ranks) {
  const std::string mark = (folder / "met-").string() + "$TORCHELASTIC_RESTART_COUNT-";
  return fmt::format(
      "touch {0}$RANK; for other in $(seq 0 {1}); do until test -e {0}$other; do sleep 0.02; done; done; ", mark,
      ranks - 1);
}

int64_t count(const std::string& text, const std::string& word) {
  int64_t found = 0;
  for (size_t at = 0; (at = text.find(word, at)) != text.npos; at += word.size()) ++found;
  return found;
}

TEST(Restart, AllRanksRestartUntilAllSucceed) {
  const TempFolder folder;
  const auto run = launch({"--nproc", "2", "--max-restarts", "3"},
                          "echo $TORCHELASTIC_RESTART_COUNT.$TORCHELASTIC_MAX_RESTARTS.${TORCHELASTIC_RUN_ID:+id} >> " +
                              (folder / "log").string() + "-$RANK; " + meet(folder.path(), 2) +
                              "test $RANK = 0 || test $TORCHELASTIC_RESTART_COUNT = 2");
  EXPECT_EQ(run.code, 0) << run.err;
  for (const char* rank : {"0", "1"}) {
    EXPECT_EQ(read_file(folder / (std::string("log-") + rank)), "0.3.id\n1.3.id\n2.3.id\n");
  }
  EXPECT_THAT(run.err, AllOf(HasSubstr("restart 1: rank 1 of 2: ended with exit code 1"), HasSubstr("restart 2:"),
                             Not(HasSubstr("error"))));
}

TEST(Restart, RunEndsWithTheLastExitCodeAfterMaxRestarts) {
  const auto run = launch({"--nproc", "2", "--max-restarts", "2"}, "exit $((RANK * (TORCHELASTIC_RESTART_COUNT + 5)))");
  EXPECT_EQ(run.code, 7);
  EXPECT_THAT(run.err, AllOf(HasSubstr("error: rank 1 of 2: ended with exit code 7"),
                             HasSubstr("2 restarts without progress, as many as --max-restarts allows")));
}

TEST(Restart, NewStepsResetTheRestartCount) {
  const TempFolder folder;
  const std::string state = (folder / "step").string();
  const auto run = launch({"--nproc", "1", "--max-restarts", "1"},
                          "s=$(($(cat " + state + " 2>/dev/null || echo 0) + 1)); echo $s > " + state +
                              "; echo $s > $TESSERA_PROGRESS_FILE; test $s = 6");
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("restart 5: rank 0 of 1: ended with exit code 1 (after step 5)"));
}

TEST(Restart, SameFailureTwiceAtOneStepEndsTheRun) {
  const auto run = launch({"--nproc", "2", "--max-restarts", "9"},
                          "test $RANK = 0 && echo 4 > $TESSERA_PROGRESS_FILE; "
                          "until grep -q 4 $TESSERA_PROGRESS_FILE; do sleep 0.02; done; exit 3");
  EXPECT_EQ(run.code, 3);
  EXPECT_EQ(count(run.err, "restart 1:"), 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr("no restart: the same failure twice after step 4. First: rank "),
                             HasSubstr("Then: rank "), Not(HasSubstr("restart 2:"))));
}

TEST(Restart, LauncherThatIsAskedToStopDoesNotRestart) {
  const auto run = launch({"--nproc", "1", "--max-restarts", "9"}, "kill -TERM $PPID; sleep 30");
  EXPECT_EQ(run.code, 128 + SIGTERM);
  EXPECT_THAT(run.err, Not(HasSubstr("restart 1")));
}

// Batch systems announce the end of a job once, by a signal.
TEST(Restart, SignalBetweenTwoAttemptsStopsTheRestarts) {
  const TempFolder folder;
  const std::string mark = (folder / "begun").string();
  const auto run =
      run_process({"sh", "-c",
                   testing::program() + " launch --max-restarts 60 -- sh -c 'touch " + mark +
                       "; exit $((TORCHELASTIC_RESTART_COUNT + 1))' & until test -e " + mark +
                       "; do sleep 0.02; done; while kill -USR1 $! 2>/dev/null; do sleep 0.02; done; wait $!"});
  EXPECT_GT(run.exit_code, 0);
  EXPECT_THAT(run.err, HasSubstr("[launch] asked to stop before restart"));
  EXPECT_LT(count(run.err, "[launch] restart "), 30) << run.err;
}

TEST(Restart, ProgramThatFailsOnTheStopSignalIsNotRestarted) {
  const TempFolder folder;
  const std::string script = "echo start >> " + (folder / "starts").string() +
                             "; trap 'exit 3' USR1; kill -USR1 $PPID; while :; do sleep 0.02; done";
  EXPECT_EQ(launch_local_ranks({"sh", "-c", script}, {.max_restarts = 3, .stops_on_usr1 = true}), 3);
  EXPECT_EQ(read_file(folder / "starts"), "start\n");
}

TEST(Restart, LongRestartReasonIsTruncated) {
  const TempFolder folder;
  const auto run = launch({"--nproc", "1", "--max-restarts", "1"},
                          "test $TORCHELASTIC_RESTART_COUNT = 0 || { echo ${#TESSERA_RESTART_REASON} > " +
                              (folder / "length").string() +
                              "; exit 0; }; { printf '{\"message\": \"'; head -c 300000 /dev/zero | tr '\\0' x; "
                              "printf '\"}'; } > $TORCHELASTIC_ERROR_FILE; exit 1");
  EXPECT_EQ(run.code, 0) << run.err.substr(0, 1000);
  const int length = std::stoi(read_file(folder / "length"));
  EXPECT_GT(length, 1000);
  EXPECT_LT(length, 8192);
}

TEST(Restart, HangUpIsIgnoredUnderNohup) {
  const auto run = run_process({"sh", "-c",
                                "trap '' HUP; exec " + testing::program() +
                                    " launch -- sh -c 'kill -HUP $PPID; kill -HUP $$; sleep 0.5; echo went on'"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "went on\n");
}

// Runs one launcher for each of `hosts` hosts on this machine, each with one rank.
std::vector<Outcome> launch_hosts(int hosts, const std::vector<std::string>& flags, const std::string& script) {
  const auto master = fmt::format("127.0.0.1:{}", testing::free_port());
  std::vector<std::future<Outcome>> launched;
  for (int host = 0; host < hosts; ++host) {
    std::vector<std::string> all = {
        "--nproc", "1", "--nnodes", std::to_string(hosts), "--node-rank", std::to_string(host), "--master", master};
    all.insert(all.end(), flags.begin(), flags.end());
    launched.push_back(std::async(std::launch::async, [=] { return launch(all, script); }));
  }
  std::vector<Outcome> outcomes;
  for (auto& each : launched) outcomes.push_back(each.get());
  return outcomes;
}

TEST(Restart, AllHostsRestartWhenARankOfOneHostFails) {
  const TempFolder folder;
  const auto outcomes =
      launch_hosts(3, {"--max-restarts", "3", "--run-id", "hosts"},
                   "echo $TORCHELASTIC_RESTART_COUNT:$TESSERA_RESTART_REASON >> " + (folder / "log").string() +
                       "-$RANK; " + meet(folder.path(), 3) + "test $RANK != 2 || test $TORCHELASTIC_RESTART_COUNT = 2");
  for (size_t host = 0; host < outcomes.size(); ++host) {
    EXPECT_EQ(outcomes[host].code, 0) << outcomes[host].err;
    EXPECT_THAT(outcomes[host].err,
                AllOf(HasSubstr("restart 1: rank 2 of 3: ended with exit code 1"), HasSubstr("restart 2:")));
    EXPECT_THAT(read_file(folder / fmt::format("log-{}", host)),
                AllOf(StartsWith("0:\n1:rank 2 of 3"), HasSubstr("\n2:rank 2 of 3")));
  }
}

TEST(Restart, MaxRestartsIsSharedByAllHosts) {
  const TempFolder folder;
  const auto outcomes = launch_hosts(2, {"--max-restarts", "2", "--run-id", "budget"},
                                     meet(folder.path(), 2) + "exit $((RANK * (TORCHELASTIC_RESTART_COUNT + 5)))");
  EXPECT_EQ(outcomes[0].code, 7) << outcomes[0].err;  // rank 1's code, although rank 0 succeeded
  EXPECT_EQ(outcomes[1].code, 7) << outcomes[1].err;
  EXPECT_THAT(outcomes[1].err, AllOf(HasSubstr("error: rank 1 of 2: ended with exit code 7"),
                                     HasSubstr("2 restarts without progress, as many as --max-restarts allows")));
}

TEST(RankOutput, EachRankAndAttemptHasSeparateFiles) {
  const TempFolder folder;
  for (int time = 0; time < 2; ++time) {
    const fs::path marks = folder / fmt::format("marks-{}", time);
    fs::create_directory(marks);
    const auto run = launch(
        {"--nproc", "2", "--max-restarts", "1", "--log-dir", (folder / "logs").string(), "--run-id", "a/b"},
        "echo out $RANK; echo err $RANK >&2; " + meet(marks, 2) + "test $TORCHELASTIC_RESTART_COUNT = 1 || exit $RANK");
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(run.out, "");
    EXPECT_THAT(run.err,
                AllOf(HasSubstr("err 1\n"), HasSubstr("the ranks' output is in ")));  // the reason of the restart
  }
  int folders = 0;
  for (const auto& entry : fs::directory_iterator(folder / "logs")) {
    ++folders;
    EXPECT_THAT(entry.path().filename().string(), StartsWith("a_b_"));
    for (const char* attempt : {"attempt_0", "attempt_1"}) {
      EXPECT_EQ(read_file(entry.path() / attempt / "1" / "stdout.log"), "out 1\n");
      EXPECT_EQ(read_file(entry.path() / attempt / "0" / "stderr.log"), "err 0\n");
    }
  }
  EXPECT_EQ(folders, 2);  // the second run has not changed the first run's files
}

TEST(RankOutput, TeeShowsEveryLineWithItsRank) {
  const TempFolder folder;
  const auto run = launch({"--nproc", "2", "--tee", "--log-dir", (folder / "logs").string()},
                          "for i in 1 2 3; do echo line $i; done; printf rest; echo bad >&2");
  EXPECT_EQ(run.code, 0) << run.err;
  for (const char* rank : {"[rank0]: ", "[rank1]: "}) {
    std::string own;  // lines of the other rank may come in between
    std::istringstream lines(run.out);
    for (std::string line; std::getline(lines, line);) own += line.starts_with(rank) ? line + "\n" : "";
    EXPECT_THAT(own, HasSubstr(std::string(rank) + "line 1\n" + rank + "line 2\n" + rank + "line 3\n"));
    EXPECT_EQ(count(run.out, std::string(rank) + "rest\n"), 1);
    EXPECT_EQ(count(run.err, std::string(rank) + "bad\n"), 1);
  }
}

TEST(RankOutput, LinesAreShownWhileTheRankRuns) {
  const TempFolder folder;
  // The rank ends when its line has been shown.
  const auto run = run_process({"sh", "-c",
                                testing::program() + " launch --tee -- sh -c 'echo now; while ! test -e " +
                                    (folder / "seen").string() + "; do sleep 0.05; done' | { read line; touch " +
                                    (folder / "seen").string() + "; echo $line; }"});
  EXPECT_EQ(run.out, "[rank0]: now\n") << run.err;
}

TEST(RankOutput, LogRankSelectsTheShownRanks) {
  for (const bool by_variable : {false, true}) {
    const std::vector<std::string> flags = by_variable ? std::vector<std::string>{"--nproc", "3"}
                                                       : std::vector<std::string>{"--nproc", "3", "--log-rank", "0,2"};
    std::map<std::string, std::string> environment;
    if (by_variable) environment["LOG_RANK"] = "0,2";
    const auto run = launch(flags, "echo I am $RANK", environment);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_THAT(run.out, AllOf(HasSubstr("I am 0\n"), HasSubstr("I am 2\n"), Not(HasSubstr("I am 1\n"))));
  }
  const auto failed =
      launch({"--nproc", "2", "--log-rank", "0"}, "test $RANK = 0 || { echo my last words >&2; exit 9; }; sleep 30");
  EXPECT_EQ(failed.code, 9);
  EXPECT_THAT(failed.err, HasSubstr("my last words\ntessera: error: rank 1 of 2: ended with exit code 9"));
  EXPECT_EQ(launch({"--log-rank", "1"}, "true").code, 2);
  EXPECT_EQ(launch({"--log-rank", "x"}, "true").code, 2);
}

TEST(Pin, PinOnBindsRanksToDifferentCores) {
  if (usable_cores() < 2) {
    GTEST_SKIP() << "one core";
  }
  const auto run = launch({"--nproc", "2", "--pin", "on", "--tee"}, "grep Cpus_allowed_list /proc/self/status");
  EXPECT_EQ(run.code, 0) << run.err;
  const auto line = [&](const std::string& rank) {
    const size_t at = run.out.find("[rank" + rank + "]: ");
    return at == run.out.npos ? "nothing of " + rank : run.out.substr(at + 9, run.out.find('\n', at) - at - 9);
  };
  EXPECT_THAT(line("0"), StartsWith("Cpus_allowed_list:"));
  EXPECT_NE(line("0"), line("1"));
  const auto off = launch({"--nproc", "2", "--pin", "off"}, "grep Cpus_allowed_list /proc/self/status");
  std::ifstream status("/proc/self/status");
  std::string own;
  while (std::getline(status, own) && !own.starts_with("Cpus_allowed_list")) {
  }
  EXPECT_EQ(off.out, own + "\n" + own + "\n");
}

}  // namespace
}  // namespace tessera::comm
