// examples/cluster/ssh.sh, with a stand-in for ssh that runs what it is given on this machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/comm/fleet.h"
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
                                        "127.0.0.1", "-p", std::to_string(comm::free_port())};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"one.invalid,two.invalid", "--"});
    command.insert(command.end(), program.begin(), program.end());
    return testing::run_process(command,
                                {.environment = {{"SSH", (runs_ / "ssh").string()}, {"TESSERA", testing::program()}}});
  }
  const TinyRun runs_;
};

TEST_F(ClusterExample, TrainsOverSeveralHostsWithTheBitsOfOne) {
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

TEST_F(ClusterExample, ALostRankStartsAllHostsAgainAndAWrongProgramNone) {
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
