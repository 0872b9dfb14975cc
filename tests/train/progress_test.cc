// Tests of the progress lines and the progress bar that a run prints.
#include "tessera/train/output/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const StepMetrics kMetrics{.step = 7,
                           .loss = 2.34567,
                           .grad_norm = 1.25,
                           .lr = 1e-4,
                           .tokens_per_second = 1234.4,
                           .memory_bytes = int64_t{512} << 20,
                           .peak_share = 0.434,
                           .seconds = 2};

struct Shown {
  std::vector<std::string> writes;
  Progress progress;
  explicit Shown(ProgressOptions options) : progress(with_sink(options, writes)) {}
  static ProgressOptions with_sink(ProgressOptions options, std::vector<std::string>& writes) {
    options.write = [&writes](std::string_view text) { writes.emplace_back(text); };
    return options;
  }
};

TEST(Progress, PlainLineShowsAllMetricsOfAStep) {
  Shown shown({.total_steps = 100});
  shown.progress.step(kMetrics);
  EXPECT_THAT(shown.writes, ElementsAre("step   7/100  loss 2.3457  norm 1.250  lr 1.00e-04  1234 tok/s  512 MiB  "
                                        "43% of peak  eta 3:06\n"));
}

TEST(Progress, LinesComeEveryNStepsAndAtTheEnd) {
  Shown shown({.total_steps = 7, .every = 3});
  for (int64_t step = 1; step <= 7; ++step) shown.progress.step({.step = step});
  ASSERT_EQ(shown.writes.size(), 3u);
  EXPECT_THAT(shown.writes[0], StartsWith("step 3/7"));
  EXPECT_THAT(shown.writes[2], StartsWith("step 7/7"));
  Shown silent({.total_steps = 2, .every = 0});
  silent.progress.step({.step = 2});
  EXPECT_TRUE(silent.writes.empty());
}

TEST(Progress, OutliersAreFlaggedAndShownBetweenLines) {
  Shown shown({.total_steps = 100, .every = 10});
  StepMetrics metrics = kMetrics;
  metrics.loss_z = -3.9;
  metrics.grad_norm_z = 5.25;
  shown.progress.step(metrics);
  ASSERT_EQ(shown.writes.size(), 1u);
  EXPECT_THAT(shown.writes[0], HasSubstr("loss 2.3457  norm 1.250 (z +5.2!)"));
  EXPECT_THAT(shown.writes[0], Not(HasSubstr("\x1b")));
  EXPECT_THAT(format_step(metrics, {.total_steps = 100, .colour = true}, 0),
              HasSubstr("\x1b[31m1.250 (z +5.2!)\x1b[0m"));
}

TEST(Progress, SkippedStepIsMarked) {
  EXPECT_THAT(format_step({.step = 1, .skipped = true}, {.total_steps = 1}, 0), EndsWith("SKIPPED: not finite"));
}

TEST(Progress, TerminalBarIsErasedAtTheEnd) {
  Shown shown({.total_steps = 10, .terminal = true, .columns = 40});
  shown.progress.step({.step = 5, .seconds = 1});
  ASSERT_EQ(shown.writes.size(), 1u);
  EXPECT_THAT(shown.writes[0], StartsWith("\r\x1b[Kstep  5/10"));
  const std::string bar = shown.writes[0].substr(shown.writes[0].find('\n') + 1);
  EXPECT_EQ(bar, "[###########...........]  50%  eta 0:05");
  EXPECT_LT(bar.size(), 40u);
  shown.progress.finish("done");
  EXPECT_EQ(shown.writes[1], "\r\x1b[Kdone\n");
}

TEST(Progress, ResumedRunCountsFromItsFirstStep) {
  Shown shown({.total_steps = 100, .first_step = 50, .terminal = true});
  shown.progress.validation(50, 2.5);
  EXPECT_THAT(shown.writes[0], HasSubstr("step  50/100  validation loss 2.5000\n"));
  EXPECT_THAT(shown.writes[0], HasSubstr(" 50%"));
}

TEST(Progress, DurationsAreFormatted) {
  EXPECT_EQ(format_duration(0.4), "0:00");
  EXPECT_EQ(format_duration(65), "1:05");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(3 * 86400 + 4 * 3600), "3d 04:00");
  EXPECT_EQ(format_duration(-1), "?");
}

}  // namespace
}  // namespace tessera::train
