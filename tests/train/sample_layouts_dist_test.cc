// Tests of text samples that runs generate during training: every layout prints the samples of one rank, once.
#include <gmock/gmock.h>

#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

std::vector<std::string> samples_of(const TinyRun& runs, const std::string& dir, int ranks,
                                    std::vector<std::string> layout) {
  layout.insert(layout.end(),
                {"train.steps=2", "train.sample_every=1", "checkpoint.every=0", "checkpoint.export=never"});
  const auto run = runs.train(dir, ranks, layout);
  EXPECT_EQ(run.exit_code, 0) << run.err;
  std::vector<std::string> found;
  std::istringstream lines(run.err + run.out);
  for (std::string line; std::getline(lines, line);) {
    if (const auto at = line.find("  sample \""); at != line.npos) found.push_back(line.substr(at));
  }
  return found;
}

TEST(SampleLayouts, PipelineAndContextParallelPrintTheSamplesOfOneRank) {
  const TinyRun runs;
  const auto wanted = samples_of(runs, "one", 1, {});
  ASSERT_EQ(wanted.size(), 2u);
  EXPECT_EQ(samples_of(runs, "pp", 2, {"parallel.pp=2", "parallel.dp_shard=1"}), wanted);
  EXPECT_EQ(samples_of(runs, "cp", 2, {"parallel.cp=2", "parallel.dp_shard=1"}), wanted);
}

}  // namespace
}  // namespace tessera::train
