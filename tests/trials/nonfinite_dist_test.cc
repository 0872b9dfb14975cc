// Tests of values that are not finite on one of several ranks: all ranks end, with one message and its exit code.
#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checkpoint.h"
#include "tests/models/tiny.h"
#include "tests/support/ranks.h"
#include "tests/train/tiny_run.h"
#include "tests/trials/nonfinite_models.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using train::TinyRun;
using Words = std::vector<std::string>;

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++count;
  return count;
}

struct Layout {
  int ranks;
  Words settings;
};
const std::vector<Layout> kLayouts = {
    {2, {}}, {2, {"parallel.tp=2"}}, {2, {"parallel.pp=2", "train.local_batch_size=6"}}};

// The second step of a run with these settings overflows.
const Words kDiverges = {"optimizer.lr=1.0e12", "schedule.warmup_steps=0", "checkpoint.every=0",
                         "checkpoint.export=never"};

Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(NonfiniteRuns, ExitWithOneAndOneMessageThatNamesTheStep) {
  const TinyRun runs;
  for (const auto& layout : kLayouts) {
    SCOPED_TRACE(fmt::format("{} {}", layout.ranks, fmt::join(layout.settings, " ")));
    const auto run =
        runs.train("run", layout.ranks, joined(joined(kDiverges, {"checkpoint.resume=never"}), layout.settings));
    EXPECT_EQ(run.exit_code, 1) << run.err;
    EXPECT_THAT(run.err, HasSubstr("[train.step] step 2: loss "));
    EXPECT_THAT(run.err, HasSubstr("not finite"));
    EXPECT_EQ(count_of(run.err, "[train.step]"), 1) << run.err;
    EXPECT_EQ(runs.metrics("run").size(), 1U) << "the step that was finite";
  }
}

// The same settings, with a validation after each step.
Words validating(const TinyRun& runs, const Words& more) {
  return joined(
      joined(kDiverges, {"data.validation=[" + (runs / "held-out.jsonl").string() + "]", "train.validate_every=1"}),
      more);
}

TEST(NonfiniteRuns, EndAtANonFiniteValidationLoss) {
  const TinyRun runs;
  const auto run = runs.train("run", 2, validating(runs, {"train.steps=2"}));
  EXPECT_EQ(run.exit_code, 1) << run.err;
  EXPECT_THAT(run.err, HasSubstr("[train.validation] step 1: validation loss "));
  EXPECT_EQ(count_of(run.err, "[train.validation]"), 1) << run.err;
  EXPECT_TRUE(runs.metrics("run", "validation_loss").back()["validation_loss"].is_null());
}

TEST(NonfiniteRuns, SkipNonFiniteStepsAndContinueIfConfigured) {
  const TinyRun runs;
  const auto run = runs.train("run", 2, validating(runs, {"train.on_nonfinite=skip", "train.steps=3"}));
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(count_of(run.err, "SKIPPED: not finite"), 2) << run.err;
  EXPECT_EQ(runs.metrics("run", "validation_loss").size(), 4U) << "before the run, too";
  EXPECT_THAT(read_file(runs / "run/metrics.jsonl"), Not(HasSubstr("nan")));
}

// Copies the newest checkpoint of `from`, with correct hashes, and writes a NaN into the first moment of one parameter.
// Returns the parameter's name.
std::string spoil_moments(const std::filesystem::path& from, const std::filesystem::path& to) {
  const auto checkpoint = Checkpoint::latest(from).value();
  NamedTensors tensors;
  std::string spoilt;
  for (const auto& entry : checkpoint.contents().metadata().entries) {
    if (!entry.tensor) continue;
    tensors.emplace_back(entry.name, checkpoint.contents().tensor(entry.name).clone());
    if (!spoilt.empty() || !entry.name.ends_with("down_proj.weight.exp_avg")) continue;
    spoilt = entry.name;
    tensors.back().second.view(-1)[-1] = std::numeric_limits<double>::quiet_NaN();
  }
  testing::run_ranks({.size = 1}, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = to, .world = world, .async = false});
    writer.save(checkpoint.step(), tensors, checkpoint.extra());
    writer.finish();
  });
  return spoilt;
}

TEST(NonfiniteRuns, RefuseToResumeFromANonFiniteOptimizerState) {
  const TinyRun runs;
  const auto first = runs.train("run", 1, {"train.steps=2", "checkpoint.export=never"});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  const auto name = spoil_moments(runs / "run/checkpoints", runs / "spoilt");
  ASSERT_FALSE(name.empty());
  const auto path = (runs / "spoilt/step-00000002").string();
  const std::string says = "tensor '" + name + "' holds values that are not finite: nan at [";
  for (const int ranks : {1, 2}) {
    const auto run = runs.train(fmt::format("resumed-{}", ranks), ranks, {"checkpoint.resume=" + path});
    EXPECT_EQ(run.exit_code, 3) << run.err;
    EXPECT_EQ(count_of(run.err, says), 1) << run.err;
  }
  const auto verify = testing::run_process({testing::program(), "ckpt", "verify", path});
  EXPECT_EQ(verify.exit_code, 3);
  EXPECT_THAT(verify.err, HasSubstr(says));
}

class NonfiniteRanks : public ::testing::Test {
 protected:
  testing::ProcessResult run(Words arguments) const {
    arguments.insert(arguments.begin(), testing::program());
    return testing::run_process(arguments, {.timeout_seconds = 60});
  }
  testing::TempFolder folder_;
};

TEST_F(NonfiniteRanks, ANonFiniteWeightOfOneRankIsReportedOnce) {
  testing::write_model(*testing::tiny_model(testing::untied()), folder_ / "good");
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  testing::write_changed(folder_ / "good", folder_ / "bad",
                         testing::spoil(name, std::numeric_limits<double>::quiet_NaN()));
  const auto bad = (folder_ / "bad").string();
  publish_file(folder_ / "in.jsonl", R"({"text": "abcdef"})");
  for (const Words& verb : {Words{"generate", "--model", bad, "--prompt", "a", "--nproc", "2"},
                            {"score", "--model", bad, "--input", (folder_ / "in.jsonl").string(), "--nproc", "2"},
                            {"serve", "--model", bad, "--port", "0", "--nproc", "2"}}) {
    const auto found = run(verb);
    const std::string says = "tensor '" + name + "' holds values that are not finite: nan at [15, 23]";
    EXPECT_EQ(found.exit_code, 3) << verb[0] << "\n" << found.err;
    EXPECT_EQ(count_of(found.err, says), 1) << found.err;
  }
}

TEST_F(NonfiniteRanks, OverflowingLogitsEndAllRanksWithOneMessage) {
  testing::write_model(*testing::overflowing_model(), folder_ / "model");
  const auto model = (folder_ / "model").string();
  publish_file(folder_ / "in.jsonl", R"({"text": "abcdef"})"
                                     "\n"
                                     R"({"text": "azc"})"
                                     "\n"
                                     R"({"text": "abc"})");
  const auto generated = run({"generate", "--model", model, "--prompt", "az", "--nproc", "2"});
  EXPECT_EQ(generated.exit_code, 1) << generated.err;
  EXPECT_EQ(count_of(generated.err, "position 2: the logit of token 0 is nan"), 1) << generated.err;
  for (const Words& layout : {Words{}, {"parallel.tp=2"}, {"parallel.pp=2"}, {"parallel.cp=2"}}) {
    const auto scored =
        run(joined({"score", "--model", model, "--input", (folder_ / "in.jsonl").string(), "--nproc", "2"}, layout));
    EXPECT_EQ(scored.exit_code, 1) << scored.err;
    EXPECT_EQ(count_of(scored.err, "record '2': the log-prob of token "), 1) << scored.err;
    EXPECT_EQ(scored.out, "");
  }
}

}  // namespace
}  // namespace tessera
