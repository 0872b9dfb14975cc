// Tests of runs whose data is not a whole number of steps, and of the texts about settings and data that a run ignores
// or changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Words = std::vector<std::string>;

Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

#define ASSERT_RUNS(run) ASSERT_EQ((run).exit_code, 0) << (run).err

// Ten rows of different lengths, in steps of four rows.
class FullEpochs : public ::testing::Test {
 protected:
  FullEpochs() {
    std::string lines;
    for (int row = 0; row < 10; ++row) {
      const std::string text(static_cast<size_t>(5 + row * row % 17), static_cast<char>('a' + row));
      lines += nlohmann::json({{"text", text}}).dump() + "\n";
      tokens_ += static_cast<int64_t>(text.size()) + 1;
    }
    runs_.write("ten.jsonl", lines);
  }
  testing::ProcessResult train(const std::string& dir, int ranks, const Words& more = {}) const {
    return runs_.train(dir, ranks,
                       joined({"data.train=" + (runs_ / "ten.jsonl").string(), "data.packing=false", "train.epochs=1",
                               "train.global_batch_size=4", "train.local_batch_size=1", "schedule.warmup_steps=0"},
                              more));
  }
  int64_t tokens_of(const std::string& dir) const {
    int64_t sum = 0;
    for (const auto& line : runs_.metrics(dir)) sum += line.at("tokens").get<int64_t>();
    return sum;
  }
  const TinyRun runs_;
  int64_t tokens_ = 0;
};

TEST_F(FullEpochs, EveryRowCountsOnceOnEveryLayout) {
  ASSERT_RUNS(train("one", 1));
  ASSERT_EQ(runs_.metrics("one").size(), 3u);
  EXPECT_EQ(tokens_of("one"), tokens_);
  const std::vector<std::tuple<std::string, int, Words>> layouts = {
      {"dp 4", 4, {}},  // in the last step two of its ranks have no row
      {"pp 2 x cp 2", 4, {"parallel.pp=2", "parallel.cp=2"}}};
  for (const auto& [name, ranks, layout] : layouts) {
    ASSERT_RUNS(train(name, ranks, layout)) << name;
    expect_same_run(runs_, name, "one", 1e-4);
    EXPECT_EQ(tokens_of(name), tokens_) << name;
  }
}

// With a learning rate of zero, steps are comparable whatever the earlier steps were. Routers count only real tokens,
// not padding.
TEST_F(FullEpochs, APartialStepMatchesABatchOfItsRows) {
  runs_.have_experts(2, {{"output_router_logits", true}, {"router_aux_loss_coef", 0.1}});
  ASSERT_RUNS(train("four", 1, {"optimizer.lr=0"}));
  ASSERT_RUNS(train("two", 1, {"optimizer.lr=0", "train.global_batch_size=2"}));
  ASSERT_RUNS(train("ep 2", 2, {"optimizer.lr=0", "parallel.ep=2"}));
  const auto wanted = runs_.metrics("two").back();
  for (const char* dir : {"four", "ep 2"}) {
    const auto last = runs_.metrics(dir).back();
    EXPECT_EQ(last.at("tokens"), wanted.at("tokens")) << dir;
    for (const char* number : {"loss", "grad_norm", "balance_loss"}) {
      const double value = wanted.at(number);
      EXPECT_NEAR(last.at(number).get<double>(), value, 1e-5 * value) << dir << " " << number;
    }
  }
}

TEST_F(FullEpochs, RunsResumeWithinAnEpochAndWithMoreEpochs) {
  ASSERT_RUNS(train("whole", 1));
  const auto from = "checkpoint.resume=" + (runs_ / "whole/checkpoints/step-00000002").string();
  ASSERT_RUNS(train("resumed", 1, {from}));
  EXPECT_EQ(runs_.weights("resumed"), runs_.weights("whole"));
  EXPECT_EQ(runs_.metrics("resumed").back().at("tokens"), runs_.metrics("whole").back().at("tokens"));

  const auto more = train("whole", 2, {"train.epochs=2"});
  ASSERT_RUNS(more);
  EXPECT_THAT(more.err, HasSubstr("step-00000003 after step 3\n"));
  EXPECT_THAT(more.err, HasSubstr("settings changed since: train.epochs 2 (was 1)\n"));
  EXPECT_EQ(runs_.metrics("whole").size(), 6u) << "ten more rows";
  EXPECT_EQ(tokens_of("whole"), 2 * tokens_);
  const auto none = train("whole", 2, {"train.epochs=2"});
  ASSERT_RUNS(none);
  EXPECT_EQ(count_of(none.err, "nothing is left to train: 6 steps are done, and train.epochs 2 asks for no more."), 1u)
      << none.err;
  EXPECT_THAT(none.err, Not(HasSubstr("settings changed")));
  EXPECT_EQ(runs_.metrics("whole").size(), 6u);
}

TEST_F(FullEpochs, CheckReportsThePartialLastStep) {
  const auto check = train("none", 1, {"--check", "schedule.warmup_steps=10", "schedule.min_lr_ratio=0.5"});
  ASSERT_RUNS(check);
  EXPECT_THAT(check.out, HasSubstr("run         3 steps, the last one of 2 rows, 1.00 epochs"));
  EXPECT_THAT(check.err, AllOf(HasSubstr("schedule.warmup_steps: 10 in a run of 3 steps: the warm-up is cut to 3."),
                               HasSubstr("without effect: schedule.min_lr_ratio 0.5 (with schedule.name constant)")));
}

TEST(RunReports, TruncatedAndOmittedSamplesOnceAtEveryStart) {
  const TinyRun runs;
  const std::string longer(60, 'x');
  std::string lines;
  for (const auto& [prompt, completion] :
       {std::pair<std::string, std::string>{"a", "b"}, {longer, "b"}, {"a", longer}, {"a", "c"}}) {
    lines += nlohmann::json({{"prompt", prompt}, {"completion", completion}}).dump() + "\n";
  }
  runs.write("pairs.jsonl", lines);
  const Words settings = {"data.train=" + (runs / "pairs.jsonl").string(), "data.format=completion",
                          "data.cache=" + (runs / "cache").string(), "train.epochs=1"};
  const std::string told =
      "data.train, of 4 samples: 2 cut to data.sequence_length 48, 1 left out without anything to learn (1 of them "
      "because of the cut)\n";
  for (const char* dir : {"first", "from-cache"}) {
    const auto run = runs.train(dir, 2, settings);
    ASSERT_RUNS(run);
    EXPECT_EQ(count_of(run.err, told), 1u) << run.err;
  }
  const auto check = runs.train("none", 1, joined(settings, {"--check"}));
  ASSERT_RUNS(check);
  EXPECT_THAT(check.out, HasSubstr("label tokens; 2 cut to data.sequence_length 48, 1 left out without anything to "
                                   "learn (1 of them because of the cut)\n"));
  const auto dropped = runs.train("dropped", 1, joined(settings, {"data.overlong=drop"}));
  EXPECT_THAT(dropped.err, HasSubstr("of 4 samples: 2 longer than data.sequence_length 48 dropped\n"));
}

TEST(RunReports, ModulesThatHaveAdapters) {
  const TinyRun runs;
  runs.have_experts(2);
  const Words settings = {"lora.rank=2", "train.steps=2", "checkpoint.export=never"};
  const std::string told =
      "896 parameters in q_proj, k_proj, v_proj, o_proj of 2 layers; experts and router stay frozen";
  const auto run = runs.train("a", 2, settings);
  ASSERT_RUNS(run);
  EXPECT_EQ(count_of(run.err, "[train.adapters] " + told), 1u) << run.err;
  const auto check = runs.train("none", 1, joined(settings, {"--check"}));
  ASSERT_RUNS(check);
  EXPECT_THAT(check.out, HasSubstr("adapters    " + told));
}

}  // namespace
}  // namespace tessera::train
