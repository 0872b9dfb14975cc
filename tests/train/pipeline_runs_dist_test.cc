// Tests of the text that a pipeline run prints before it starts, and of its errors.
#include <gmock/gmock.h>

#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

TEST(PipelineRuns, CheckReportsTheBubbleAndErrorsPrecedeWeightLoading) {
  const TinyRun runs;
  auto check = runs.command("checked", 2, {"parallel.pp=2", "train.local_batch_size=1"});
  check.emplace_back("--check");
  const auto told = testing::run_process(check);
  ASSERT_EQ(told.exit_code, 0) << told.err;
  EXPECT_THAT(told.out, HasSubstr("pipeline    1F1B, stages of 1, 1 layers, ranks wait 8 % of the time and hold 2 "
                                  "micro-batches at most"));
  runs.write("base/model.safetensors", "no weights, as whoever reads them finds");
  std::filesystem::create_symlink("nowhere", runs / "base/more.safetensors");
  const auto refusal = [&](int ranks, std::vector<std::string> overrides) {
    overrides.emplace_back("model.init=pretrained");
    const auto result = runs.train("refused", ranks, overrides);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  EXPECT_THAT(refusal(2, {"parallel.pp=2", "parallel.schedule=ZBVZeroBubble"}), HasSubstr("stages"));
  EXPECT_THAT(refusal(2, {"parallel.pp=2", "parallel.schedule=2F2B"}), HasSubstr("2F2B"));
  EXPECT_THAT(refusal(2, {"parallel.pp=2", "parallel.layers_per_stage=5"}), HasSubstr("layers"));
  EXPECT_THAT(refusal(2, {"parallel.ep=2"}), HasSubstr("has no experts"));
  runs.have_experts(2);
  EXPECT_THAT(refusal(3, {"parallel.ep=3"}), HasSubstr("wanted a divisor of the 4 experts"));
}

}  // namespace
}  // namespace tessera::train
