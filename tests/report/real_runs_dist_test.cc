// The report of three real runs, made as by a user and shown in a real browser.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/report/browser.h"
#include "tests/train/tiny_run.h"

namespace tessera::report {
namespace {

using ::testing::ElementsAre;
using train::TinyRun;

TEST(RealRuns, ReportOfThreeRunsShowsEveryStep) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  const TinyRun runs;
  std::vector<std::string> command = {testing::program(), "report"};
  for (const auto& [name, lr] :
       std::vector<std::pair<std::string, std::string>>{{"slow", "1e-4"}, {"middle", "1e-3"}, {"fast", "1e-2"}}) {
    const auto run = runs.train(name, 2,
                                {"optimizer.lr=" + lr, "train.steps=20", "checkpoint.every=0", "train.validate_every=5",
                                 "data.validation=[" + (runs / "held-out.jsonl").string() + "]", "train.profile=true"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    command.push_back((runs / name).string());
  }
  const auto page = (runs / "report.html").string();
  command.insert(command.end(), {"-o", page});
  const auto report = testing::run_process(command);
  ASSERT_EQ(report.exit_code, 0) << report.err;
  const auto lines = told(read_file(page), std::string(kInked) + R"(
for (const id of ['loss', 'validation', 'grad_norm', 'lr', 'tokens_per_second', 'seconds', 'memory']) {
  tell(`${id} ${chart(id).dataset.points} ${['--run0', '--run1', '--run2'].some((name) => inked(id, name) > 50)}`);
}
tell(`parts ${chart('parts').dataset.points >= 60 * 4} ${chart('parts').textContent.includes('wait')}`);
tell(`differ ${[...document.querySelectorAll('#differences-table td')].slice(0, 3).map((cell) => cell.textContent)}`);
const plot = chart('loss').querySelector('.plot');
plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'End', bubbles: true, cancelable: true}));
setTimeout(() => tell(chart('loss').querySelector('.readout').textContent.replace(/[0-9.]+(e-?[0-9]+)?(?= |$)/g, 'N')), 50);
)");
  // Each run is also validated before its first step.
  EXPECT_THAT(lines, ElementsAre("loss 60 true", "validation 15 true", "grad_norm 60 true", "lr 60 true",
                                 "tokens_per_second 60 true", "seconds 60 true", "memory 60 true", "parts true true",
                                 "differ 0.0001,0.001,0.01", "step N ·  slow N ·  middle N ·  fast N"));
}

}  // namespace
}  // namespace tessera::report
