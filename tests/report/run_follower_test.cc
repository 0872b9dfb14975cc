// RunFollower reads a run while the run is written: each line once, files that are replaced, and a bounded part of a
// long run.
#include "tessera/report/run_follower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "tests/support/temp_folder.h"

namespace tessera::report {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

class RunFollowerTest : public ::testing::Test {
 protected:
  RunFollowerTest() { std::filesystem::create_directories(folder_ / "run"); }
  void append(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / "run" / name, std::ios::app | std::ios::binary) << text;
  }
  static std::string line(int64_t step, double loss, double norm = 1) {
    return fmt::format("{{\"step\":{},\"loss\":{:.4f},\"grad_norm\":{:.4f}}}\n", step, loss, norm);
  }
  const testing::TempFolder folder_;
};

TEST_F(RunFollowerTest, ReadsEachLineOnce) {
  append("metrics.jsonl", line(1, 5) + line(2, 4));
  RunFollower follower(folder_ / "run", {});
  EXPECT_THAT(follower.history().steps.step, ElementsAre(1, 2));
  {  // the line was read before, so this change has no effect
    std::fstream file(folder_ / "run/metrics.jsonl", std::ios::in | std::ios::out | std::ios::binary);
    file << line(1, 7).substr(0, 20);
  }
  append("metrics.jsonl", line(3, 3) + "{\"step\":4,");
  append("events.jsonl", "{\"step\":1,\"warning\":\"careful\"}\n{\"step\":1,\"odd\":1}\n");
  const auto more = follower.history();
  EXPECT_THAT(more.steps.step, ElementsAre(1, 2, 3));
  EXPECT_THAT(more.steps.columns.at("loss"), ElementsAre(5, 4, 3));
  append("metrics.jsonl", "\"loss\":2}\n");
  const auto whole = follower.history();
  EXPECT_THAT(whole.steps.step, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(whole.warnings.size(), 1u);
  EXPECT_THAT(whole.notes, ElementsAre("1 lines of events.jsonl could not be read"));
}

TEST_F(RunFollowerTest, RestartsWhenAResumedRunHasDroppedLines) {
  append("metrics.jsonl", line(1, 5) + line(2, 4) + line(3, 3));
  append("events.jsonl", "{\"step\":1,\"warning\":\"careful\"}\n");
  RunFollower follower(folder_ / "run", {});
  EXPECT_EQ(follower.history().steps.step.size(), 3u);
  std::ofstream(folder_ / "run/next") << line(1, 5) << line(2, 8);
  std::filesystem::rename(folder_ / "run/next", folder_ / "run/metrics.jsonl");
  const auto resumed = follower.history();
  EXPECT_THAT(resumed.steps.columns.at("loss"), ElementsAre(5, 8));
  EXPECT_EQ(resumed.warnings.size(), 1u);
  // The file is truncated and then grows beyond its old size. The inode stays the same.
  std::filesystem::resize_file(folder_ / "run/metrics.jsonl", line(1, 5).size());
  append("metrics.jsonl", line(2, 9) + line(3, 9) + line(4, 9));
  EXPECT_THAT(follower.history().steps.columns.at("loss"), ElementsAre(5, 9, 9, 9));
}

TEST_F(RunFollowerTest, DownsamplesALongRunButKeepsSpikesAndScores) {
  RunFollower follower(folder_ / "run", {.rows = 1000, .events = 5}), all(folder_ / "run", {});
  std::string lines, events;
  constexpr int64_t kSteps = 40'000;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const double wave = static_cast<double>(step % 7) * 0.001;
    lines += line(step, step == 12'345 ? 50 : 2 + wave, step == 23'456 ? 80 : 1 + wave);
    if (step % 1000 != 0) continue;
    append("metrics.jsonl", lines);
    append("events.jsonl", fmt::format("{{\"step\":{0},\"warning\":\"at {0}\"}}\n", step));
    lines.clear();
    follower.history();
  }
  const auto run = follower.history(), whole = all.history();
  EXPECT_EQ(run.step_count, static_cast<size_t>(kSteps));
  EXPECT_LE(run.steps.step.size(), 1000u);
  EXPECT_GE(run.steps.step.size(), 200u);
  for (const int64_t step : {int64_t{1}, int64_t{12'345}, int64_t{23'456}, kSteps}) {
    EXPECT_THAT(run.steps.step, Contains(step));
  }
  // Old steps are kept as often as new ones.
  const auto of_first_half = std::ranges::count_if(run.steps.step, [](int64_t step) { return step <= kSteps / 2; });
  EXPECT_GT(of_first_half, static_cast<int64_t>(run.steps.step.size()) / 4);
  ASSERT_EQ(run.loss_z.size(), run.steps.step.size());
  for (size_t row = 0; row < run.steps.step.size(); ++row) {
    const auto same = static_cast<size_t>(run.steps.step[row] - 1);
    EXPECT_EQ(run.steps.columns.at("loss")[row], whole.steps.columns.at("loss")[same]);
    for (const auto& [own, full] :
         {std::pair(run.loss_z[row], whole.loss_z[same]), std::pair(run.grad_norm_z[row], whole.grad_norm_z[same])}) {
      EXPECT_TRUE(own == full || (std::isnan(own) && std::isnan(full))) << own << " " << full;
    }
  }
  ASSERT_EQ(run.warnings.size(), 5u);
  EXPECT_EQ(run.warnings.back().text, "at 40000");
}

TEST_F(RunFollowerTest, UnterminatedLineUsesNoMemory) {
  append("metrics.jsonl", line(1, 5));
  RunFollower follower(folder_ / "run", {});
  append("metrics.jsonl", std::string(GrowingLines::kLongestLine + 100, 'x'));
  EXPECT_EQ(follower.history().steps.step.size(), 1u);
  append("metrics.jsonl", "x\n" + line(2, 4));
  const auto run = follower.history();
  EXPECT_THAT(run.steps.step, ElementsAre(1, 2));
  EXPECT_THAT(run.notes, ElementsAre("1 lines of metrics.jsonl could not be read"));
}

}  // namespace
}  // namespace tessera::report
