// Tests of training runs of the real program on tensor-parallel layouts.
#include <gmock/gmock.h>

#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct TensorParallelRun {
  std::string name;
  int ranks;
  std::vector<std::string> overrides;
};

// 47 tokens per row are not divisible by any number of ranks.
TEST(TensorParallelRuns, TrainAsOneRank) {
  const TinyRun runs;
  const std::vector<std::string> common = {"checkpoint.every=0", "train.steps=4", "data.sequence_length=47"};
  const auto run = [&](const TensorParallelRun& each) {
    auto overrides = each.overrides;
    overrides.insert(overrides.end(), common.begin(), common.end());
    const auto result = runs.train(each.name, each.ranks, overrides);
    ASSERT_EQ(result.exit_code, 0) << each.name << ": " << result.err;
  };
  run({"one", 1, {}});
  const std::vector<TensorParallelRun> layouts = {
      {"tp", 2, {"parallel.tp=2"}},
      {"sequences", 2, {"parallel.tp=2", "parallel.sequence_parallel=true"}},
      {"dp-tp", 4, {"parallel.tp=2", "parallel.activation_checkpointing=full", "checkpoint.export=never"}},
      {"dp-sequences", 4, {"parallel.tp=-1", "parallel.dp_shard=2", "parallel.sequence_parallel=true"}},
      {"shared-heads",
       4,
       {"parallel.tp=4", "parallel.replicate_kv=true", "parallel.activation_checkpointing=selective"}}};
  for (const auto& layout : layouts) {
    run(layout);
    expect_same_run(runs, layout.name, "one");
  }
  EXPECT_EQ(runs.weights("dp-sequences").size(), runs.weights("one").size()) << "rank 0 writes the whole model";
}

TEST(TensorParallelRuns, ResumeOnAnotherLayout) {
  const TinyRun runs;
  const auto whole = runs.train("whole", 1, {"checkpoint.every=0", "train.steps=4", "checkpoint.export=never"});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const std::vector<std::string> two_steps = {"train.steps=2", "checkpoint.export=never"};
  for (const bool grows : {true, false}) {
    const std::string dir = grows ? "grows" : "shrinks";
    const std::vector<std::string> tensor = {"parallel.tp=2", "parallel.sequence_parallel=true"};
    auto first = two_steps, then = std::vector<std::string>{"train.steps=4", "checkpoint.export=never"};
    (grows ? then : first).insert((grows ? then : first).end(), tensor.begin(), tensor.end());
    const auto begun = runs.train(dir, grows ? 1 : 4, first);
    ASSERT_EQ(begun.exit_code, 0) << begun.err;
    const auto ended = runs.train(dir, grows ? 4 : 1, then);
    ASSERT_EQ(ended.exit_code, 0) << ended.err;
    expect_same_run(runs, dir, "whole");
  }
}

TEST(TensorParallelRuns, InvalidSettingsAreRefusedBeforeTheStart) {
  const TinyRun runs;
  runs.write("base/model.safetensors", "no weights, as whoever reads them finds");
  const auto read = runs.train("read", 2, {"model.init=pretrained", "parallel.tp=2"});
  EXPECT_EQ(read.exit_code, 3) << read.err;
  std::filesystem::create_symlink("nowhere", runs / "base/more.safetensors");  // another file without weights
  const auto found = runs.train("found", 2, {"model.init=pretrained", "parallel.tp=2"});
  EXPECT_NE(found.exit_code, 0);
  EXPECT_THAT(found.err, HasSubstr("more.safetensors"));
  const auto refusal = [&](int ranks, std::vector<std::string> overrides) {
    overrides.emplace_back("model.init=pretrained");
    const auto result = runs.train("refused", ranks, overrides);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  EXPECT_THAT(refusal(4, {"parallel.tp=4"}), HasSubstr("parallel.replicate_kv"));
  EXPECT_THAT(refusal(3, {"parallel.tp=3"}), HasSubstr("num_key_value_heads (2) must be divisible by TP size (3)"));
  EXPECT_THAT(refusal(2, {"parallel.tp=2", "parallel.plan=nowhere.yaml"}), HasSubstr("one of three"));
  EXPECT_THAT(refusal(2, {"parallel.tp=2", "parallel.plan=hf", "parallel.sequence_parallel=true"}),
              HasSubstr("HF tp plan"));
  const std::string own_plan = "parallel.plan=" + (runs / "plan.yaml").string();
  runs.write("plan.yaml", "model.layers.*.mlp.up_proj: sideways\n");
  EXPECT_THAT(refusal(2, {"parallel.tp=2", own_plan}), HasSubstr("Unknown parallel style: sideways"));
  runs.write("plan.yaml", "decoder.layers.*.mlp.up_proj: colwise\n");
  EXPECT_THAT(refusal(2, {"parallel.tp=2", own_plan}), HasSubstr("no pattern of the plan (decoder.layers.*"));
}

TEST(TensorParallelRuns, AcceptAPlanFileAndReportSettingsWithoutEffect) {
  const TinyRun runs;
  runs.write("plan.yaml",
             "model.layers.*.mlp.gate_proj: colwise\nmodel.layers.*.mlp.up_proj: colwise\n"
             "model.layers.*.mlp.down_proj: rowwise\nmodel.layers.*.experts: colwise\n");
  const std::vector<std::string> common = {"checkpoint.every=0", "train.steps=2", "checkpoint.export=never"};
  auto own = common;
  own.insert(own.end(),
             {"parallel.tp=2", "parallel.plan=" + (runs / "plan.yaml").string(), "parallel.cpu_offload=true"});
  const auto one = runs.train("one", 1, common), planned = runs.train("planned", 2, own);
  ASSERT_EQ(one.exit_code, 0) << one.err;
  ASSERT_EQ(planned.exit_code, 0) << planned.err;
  expect_same_run(runs, "planned", "one");
  EXPECT_THAT(planned.err, HasSubstr("'model.layers.*.experts' matches no module"));
  if (!testing::on_accelerator()) {  // accelerators support this setting
    EXPECT_THAT(planned.err, HasSubstr("cpu_offload"));
  }
  auto alone = common;
  alone.emplace_back("parallel.sequence_parallel=true");
  const auto warned = runs.train("warned", 1, alone);
  EXPECT_EQ(warned.exit_code, 0);
  EXPECT_THAT(warned.err, HasSubstr("sequence_parallel has no effect, because tp is 1"));
  EXPECT_THAT(one.err, Not(HasSubstr("sequence_parallel")));
}

}  // namespace
}  // namespace tessera::train
