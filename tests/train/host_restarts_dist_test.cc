// Tests that both hosts start again when a rank on one of two hosts is killed. The run ends with the bits of an
// undisturbed run.
#include "tests/support/free_port.h"
#include "tests/train/kills.h"

namespace tessera::train {
namespace {

// The launchers of two hosts, both on this machine. Each launcher has one rank of the same run.
class TwoLaunchers {
 public:
  TwoLaunchers(const TinyRun& runs, const std::string& dir) {
    const auto master = fmt::format("127.0.0.1:{}", testing::free_port());
    for (const char* host : {"0", "1"}) {
      std::vector<std::string> command = {testing::program(),
                                          "launch",
                                          "--nproc",
                                          "1",
                                          "--nnodes",
                                          "2",
                                          "--node-rank",
                                          host,
                                          "--master",
                                          master,
                                          "--max-restarts",
                                          "3",
                                          "--run-id",
                                          dir,
                                          "--",
                                          testing::program(),
                                          "train",
                                          (runs / "recipe.yaml").string(),
                                          "checkpoint.dir=" + (runs / dir).string(),
                                          "checkpoint.every=1",
                                          "train.steps=8"};
      hosts_.push_back(std::make_unique<Processes>(command, runs / "tmp", runs / (dir + ".log" + host)));
    }
  }
  Processes& host(size_t number) { return *hosts_[number]; }

 private:
  std::vector<std::unique_ptr<Processes>> hosts_;
};

TEST(HostRestarts, RankKilledOnOneHostDoesNotChangeTheResult) {
  const TinyRun runs;
  std::filesystem::create_directory(runs / "tmp");
  {
    TwoLaunchers undisturbed(runs, "undisturbed");
    for (size_t host : {0, 1}) ASSERT_EQ(undisturbed.host(host).wait(), 0) << read_file(runs / "undisturbed.log0");
  }
  for (size_t victim : {0, 1}) {
    const auto dir = fmt::format("killed-{}", victim);
    TwoLaunchers launchers(runs, dir);
    bool killed = false;
    while (!killed && !launchers.host(victim).ended()) {
      if (runs.metrics(dir).size() >= 3) {
        for (const auto& [process, role] : launchers.host(victim).alive()) {
          if (role == "rank") killed = ::kill(process, SIGKILL) == 0 || killed;
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_TRUE(killed);
    for (size_t host : {0, 1}) {
      const auto log = runs / fmt::format("{}.log{}", dir, host);
      EXPECT_EQ(launchers.host(host).wait(), 0) << read_file(log);
      EXPECT_THAT(read_file(log),
                  ::testing::HasSubstr(fmt::format("restart 1: rank {} of 2: ended by signal 9", victim)));
    }
    EXPECT_EQ(runs.metrics(dir).size(), 8U);
    EXPECT_TRUE(runs.weights(dir) == runs.weights("undisturbed"));
  }
}

}  // namespace
}  // namespace tessera::train
