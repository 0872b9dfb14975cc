// Tests of runs whose linears multiply in float8: layouts with the same rows per micro-batch give the same losses, and
// the losses differ from a run without float8.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/train/run/run_layout.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

TEST(Float8Runs, LayoutsWithEqualMicroBatchesHaveEqualLosses) {
  const TinyRun runs;
  const auto train = [&](const std::string& dir, int ranks, std::vector<std::string> more) {
    more.insert(more.end(), {"train.steps=3", "checkpoint.every=0", "checkpoint.export=never"});
    const auto run = runs.train(dir, ranks, more);
    ASSERT_EQ(run.exit_code, 0) << run.err;
  };
  const std::string on = "precision.fp8=true";
  train("one", 1, {on});
  train("plain", 1, {});
  train("dp", 2, {on});
  train("pp", 2, {on, "parallel.pp=2", "parallel.dp_shard=1"});
  for (const char* dir : {"dp", "pp"}) expect_same_run(runs, dir, "one");
  const auto found = runs.metrics("one"), plain = runs.metrics("plain");
  ASSERT_EQ(found.size(), 3u);
  for (size_t i = 0; i < found.size(); ++i) {
    const double loss = plain[i]["loss"], off = std::abs(found[i]["loss"].get<double>() - loss);
    EXPECT_GT(off, 1e-6 * loss) << "step " << i + 1;
    EXPECT_LT(off, 2e-2 * loss) << "step " << i + 1;
  }
}

TEST(Float8Runs, AreRefusedWithTensorParallelAndLora) {
  const auto why = [](const RunLayout& layout, const Recipe& recipe) -> std::string {
    try {
      check_layout(recipe, layout,
                   ModelConfig::parse(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 32,
          "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64})",
                                      "tiny"));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      return error.what();
    }
    return "";
  };
  Recipe recipe;
  recipe.precision.fp8 = true;
  EXPECT_EQ(why({.dp_shard = 2}, recipe), "");
  EXPECT_THAT(why({.tp = 2}, recipe), ::testing::HasSubstr("precision.fp8: found true with tp 2"));
  recipe.lora.rank = 4;
  EXPECT_THAT(why({}, recipe), ::testing::HasSubstr("precision.fp8: found true with model.lora"));
}

}  // namespace
}  // namespace tessera::train
