// Tests of examples/cluster/ssh.sh. A script replaces ssh and runs the commands on this machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "tests/support/free_port.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class ClusterExample : public ::testing::Test {
 protected:
  ClusterExample() {
    runs_.write("ssh", "#!/bin/sh\necho \"$1\" >> " + (runs_ / "hosts").string() + "\n" + "ps -ef >> " +
                           (runs_ / "seen").string() + "\nexec sh -c \"$2\"\n");
    fs::permissions(runs_ / "ssh", fs::perms::owner_all);
  }
  testing::ProcessResult start(std::vector<std::string> flags, const std::vector<std::string>& program) const {
    std::vector<std::string> command = {(testing::source_folder() / "examples/cluster/ssh.sh").string(), "-m",
                                        "127.0.0.1", "-p", std::to_string(testing::free_port())};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"one.invalid,two.invalid", "--"});
    command.insert(command.end(), program.begin(), program.end());
    return testing::run_process(command,
                                {.environment = {{"SSH", (runs_ / "ssh").string()}, {"TESSERA", testing::program()}}});
  }
  const TinyRun runs_;
};

TEST_F(ClusterExample, TrainsOnTwoHostsBitwiseAsOnOne) {
  const std::vector<std::string> train = {testing::program(), "train", (runs_ / "recipe.yaml").string(),
                                          "comm.backend=gloo"};
  auto apart = train, together = train;
  apart.push_back("checkpoint.dir=" + (runs_ / "apart").string());
  const auto run = start({"-n", "1"}, apart);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(read_file(runs_ / "hosts").size(), std::string("one.invalid\ntwo.invalid\n").size());
  EXPECT_THAT(run.err, Not(HasSubstr("no token")));
  const auto plain = runs_.train("together", 2, {"comm.backend=gloo"});
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_TRUE(runs_.weights("apart") == runs_.weights("together"));
}

TEST_F(ClusterExample, RestartsAllHostsAfterALostRankButNotAfterAUsageError) {
  const std::string mark = (runs_ / "mark").string();
  const auto again = start(
      {"-r", "2"}, {"sh", "-c", "test $RANK = 0 || test -e " + mark + " || { touch " + mark + "; kill -KILL $$; }"});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.err, HasSubstr("ssh.sh: code 137, start 2 of 3"));
  const auto wrong = start({"-r", "2"}, {"sh", "-c", "exit 2"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, Not(HasSubstr("start 2")));
  EXPECT_EQ(start({"-x"}, {"true"}).exit_code, 2);
}

// When the script is asked to stop, or is killed, the launchers on the hosts stop, their ranks may save, and no
// launcher starts the run again.
TEST_F(ClusterExample, StoppingTheScriptStopsTheLaunchersOnAllHosts) {
  for (const std::string signal : {"TERM", "KILL"}) {
    SCOPED_TRACE(signal);
    const std::string place = (runs_ / signal).string();
    fs::create_directory(place);
    const std::string rank = "trap 'touch " + place + "/saved-$RANK; exit 0' TERM; touch " + place +
                             "/up-$RANK; while :; do sleep 0.05; done";
    const std::string script =
        "$SSH_SH -r 3 -m 127.0.0.1 -p " + std::to_string(testing::free_port()) +
        " one.invalid,two.invalid -- sh -c \"$RANK_SCRIPT\" & "
        "until test -e $PLACE/up-0 && test -e $PLACE/up-1; do sleep 0.05; done; kill -$SIGNAL $!; wait $!; code=$?; "
        "until test -e $PLACE/saved-0 && test -e $PLACE/saved-1; do sleep 0.05; done; exit $code";
    const auto run = testing::run_process(
        {"sh", "-c", script},
        {.environment = {{"SSH", (runs_ / "ssh").string()},
                         {"TESSERA", testing::program()},
                         {"SSH_SH", (testing::source_folder() / "examples/cluster/ssh.sh").string()},
                         {"RANK_SCRIPT", rank},
                         {"PLACE", place},
                         {"SIGNAL", signal}},
         .timeout_seconds = 60});
    EXPECT_EQ(run.exit_code, signal == "TERM" ? 0 : 128 + SIGKILL) << run.err;
    EXPECT_THAT(run.err, Not(HasSubstr("start 2")));
  }
}

// Runs the script of a pod. A program in place of tessera writes how the run ended.
TEST_F(ClusterExample, DrainedPodIsNotReportedAsFinished) {
  const auto yaml = (testing::source_folder() / "examples/cluster/jobset.yaml").string();
  runs_.write("tessera",
              "#!/bin/sh\necho \"{\\\"step\\\":3,\\\"end\\\":\\\"$END\\\"}\" >> \"$RUN/events.jsonl\"\nexit $CODE\n");
  fs::permissions(runs_ / "tessera", fs::perms::owner_all);
  const auto place = (runs_ / "tessera").parent_path().string();
  const auto code = [&](const std::string& index, const std::string& end, const std::string& given) {
    const std::string script =
        "script=$(sed -n '/- |$/,/env:$/p' " + yaml +
        " | sed -e '1d;$d' -e \"s:/runs/tessera:$RUN:g\") && PATH=$RUN:$PATH exec sh -c \"$script\"";
    return testing::run_process({"sh", "-c", script}, {.environment = {{"RUN", place},
                                                                       {"END", end},
                                                                       {"CODE", given},
                                                                       {"JOBSET_NAME", "tessera"},
                                                                       {"JOBSET_RESTART", "0"},
                                                                       {"JOB_COMPLETION_INDEX", index}}})
        .exit_code;
  };
  EXPECT_EQ(code("0", "done, runs/a", "0"), 0);
  EXPECT_EQ(code("0", "asked to stop after step 3; the same command goes on from there", "0"), 75);
  EXPECT_EQ(code("1", "asked to stop after step 3; the same command goes on from there", "0"), 0);
  EXPECT_EQ(code("0", "asked to stop after step 3; the same command goes on from there", "4"), 4);
}

TEST(ClusterExamples, ShellcheckFindsNothing) {
  const auto folder = testing::source_folder() / "examples/cluster";
  const auto run = testing::run_process({"sh", "-c",
                                         "command -v shellcheck > /dev/null || exit 99; exec shellcheck " +
                                             (folder / "ssh.sh").string() + " " + (folder / "slurm.sbatch").string()});
  if (run.exit_code == 99) GTEST_SKIP() << "no shellcheck here";
  EXPECT_EQ(run.exit_code, 0) << run.out;
}

}  // namespace
}  // namespace tessera::train
