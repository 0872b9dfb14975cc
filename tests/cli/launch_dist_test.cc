// `tessera launch` and --nproc, through the real program. tests/comm/launcher_dist_test.cc tests failures of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::program;
using testing::run_process;
using ::testing::StartsWith;

TEST(Launch, RanksInheritOutputAndTheirFailureIsTheExitCode) {
  const testing::TempFolder folder;
  const std::string mark = (folder / "said").string();  // rank 1 fails after rank 0 has written
  const auto run = run_process({program(), "launch", "--nproc", "2", "--", "sh", "-c",
                                "echo rank $RANK of $WORLD_SIZE; test $RANK = 1 || touch " + mark + "; until test -e " +
                                    mark + "; do sleep 0.02; done; exit $((RANK * 9))"});
  EXPECT_EQ(run.exit_code, 9);
  EXPECT_THAT(run.out, HasSubstr("rank 0 of 2\n"));
  EXPECT_THAT(run.out, HasSubstr("rank 1 of 2\n"));
  EXPECT_EQ(run.err, "tessera: error: rank 1 of 2: ended with exit code 9\n");
}

TEST(Launch, AnErrorOfAVerbInARankIsPrintedOnce) {
  const auto run = run_process({program(), "launch", "--nproc", "2", "--", program(), "doctor", "--no-such-flag"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, StartsWith("tessera: error: rank "));
  EXPECT_THAT(run.err, HasSubstr("--no-such-flag"));
  EXPECT_EQ(std::ranges::count(run.err, '\n'), 1) << run.err;
}

TEST(Launch, ArgumentsAfterTheDashesArePassedToTheProgram) {
  const auto run = run_process({program(), "launch", "--", "printf", "%s,", "--nproc", "--", "--help"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "--nproc,--,--help,");
}

TEST(Launch, TorchrunFlagsAreAcceptedOrExplained) {
  const auto run = run_process({program(), "launch", "--nproc_per_node=2", "--", "sh", "-c", "echo $WORLD_SIZE"});
  EXPECT_EQ(run.out, "2\n2\n") << run.err;
  for (const auto& [flag, advice] :
       std::vector<std::pair<std::string, std::string>>{{"--standalone", "leave it out"},
                                                        {"--rdzv_endpoint=a:1", "--master HOST:PORT"},
                                                        {"--redirects=3", "--log-dir"}}) {
    const auto refused = run_process({program(), "launch", flag, "--", "true"});
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.err, HasSubstr("is torchrun's")) << flag;
    EXPECT_THAT(refused.err, HasSubstr(advice)) << flag;
  }
}

TEST(Launch, UsageErrorsExitWithTwo) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--nproc", "2"},
                                                    {"--nproc", "2", "--"},
                                                    {"--nproc", "0", "--", "true"},
                                                    {"--nproc", "2,1", "--", "true"},
                                                    {"--nproc", "x", "--", "true"},
                                                    {"--nnodes", "2", "--", "true"},
                                                    {"--", "/no/such/program"}}) {
    std::vector<std::string> all = {program(), "launch"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const auto run = run_process(all);
    EXPECT_EQ(run.exit_code, 2) << ::testing::PrintToString(arguments);
    EXPECT_THAT(run.err, StartsWith("tessera: error: ["));
  }
}

TEST(Launch, LeavesNoTemporaryFiles) {
  const testing::TempFolder folder;
  const auto run = run_process({program(), "launch", "--nproc", "2", "--", "sh", "-c", "exit 1"},
                               {.input = "", .environment = {{"TMPDIR", folder.path().string()}}});
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace tessera
