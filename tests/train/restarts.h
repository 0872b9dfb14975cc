// SIGKILL of ranks under a launcher that starts them again. The run ends by itself, with the bits of an undisturbed
// run.
#pragma once

#include "tests/train/kills.h"

namespace tessera::train {

inline void expect_run_survives_kills(int kills, int most_a_run, unsigned seed, int steps) {
  std::mt19937 random(seed);
  const TinyRun runs;
  std::filesystem::create_directory(runs / "tmp");
  std::map<int, std::string> expected;  // weights by number of ranks
  const std::vector<std::string> more = {"checkpoint.every=1", "train.steps=" + std::to_string(steps)};
  int killed = 0;
  for (int number = 0; killed < kills; ++number) {
    const int ranks = 2 + number % 2;
    if (!expected.contains(ranks)) {
      const auto dir = "undisturbed" + std::to_string(ranks);
      const auto run = runs.train(dir, ranks, more);
      ASSERT_EQ(run.exit_code, 0) << run.err;
      expected[ranks] = runs.weights(dir);
    }
    const auto dir = "run" + std::to_string(number);
    SCOPED_TRACE(fmt::format("seed {}, run {} on {} ranks, after {} kills", seed, number, ranks, killed));
    auto command = runs.command(dir, ranks, more);
    command.insert(command.end(), {"--max-restarts", "20"});
    Processes processes(command, runs / "tmp", runs / "log");
    int of_this_run = 0;
    while (of_this_run < most_a_run && killed < kills) {
      if (!await_kill_time(processes, random() % 2 == 0, runs / dir / "checkpoints", random)) break;
      auto alive = processes.alive();
      std::erase_if(alive, [](const auto& one) { return one.second != "rank"; });
      if (alive.empty()) continue;
      auto victim = alive.begin();
      std::advance(victim, random() % alive.size());
      if (::kill(victim->first, SIGKILL) != 0) continue;
      ++killed;
      ++of_this_run;
    }
    const int code = processes.wait();
    const std::string log = read_file(runs / "log");
    ASSERT_EQ(code, 0) << log;
    EXPECT_EQ(runs.metrics(dir).size(), static_cast<size_t>(steps));
    EXPECT_TRUE(runs.weights(dir) == expected[ranks]) << log;
    EXPECT_EQ(log.find("tessera: error"), log.npos) << log;
    // LATEST and two checkpoints, and a third checkpoint if the last kill was between the last save and its pruning.
    expect_no_files_left(runs, dir, 4);
    if (::testing::Test::HasFailure()) return;
    std::filesystem::remove_all(runs / dir);
  }
  std::printf("%d ranks killed\n", killed);
}

}  // namespace tessera::train
