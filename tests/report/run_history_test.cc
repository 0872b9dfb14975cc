// read_run(): the history of a run from its files, with the run's state, and the rows that are kept for charts.
#include "tessera/report/run_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "tessera/base/error.h"
#include "tessera/base/machine/host.h"
#include "tessera/report/metric_rows.h"
#include "tests/support/temp_folder.h"

namespace tessera::report {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

std::string error_of(const std::filesystem::path& folder) {
  try {
    read_run(folder);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(RunHistory, ParsesMetricsEventsAndRecipe) {
  const testing::TempFolder temp;
  write(temp / "demo/recipe.yaml",
        "model:\n  path: \"m\"\ntrain: {steps: 3, seed: 1}\ndata: {train: [a, b]}\nlora: null\n");
  write(temp / "demo/metrics.jsonl",
        R"({"step":1,"loss":3.5,"lr":0.1,"parts":{"compute":0.5},"communication_by_rank":[0.25,0.5]}
{"step":1,"validation_loss":3.0,"seconds":1}
{"step":2,"loss":null,"lr":0.2}
{"step":2,"loss":2.5,"lr":0.3}
no line
{"loss":1}
{"step":3,"loss":2)");
  write(temp / "demo/events.jsonl",
        R"({"step":0,"session":{"host":"a","ranks":2}}
{"step":0,"warning":"careful"}
{"step":2,"sample":{"prompt":"Once","text":"upon"}}
{"step":2,"restart":{"attempt":3,"reason":"rank 1 of 2: ended by signal 9"}}
{"step":2,"end":"done"}
{"step":2,"sample":"no sample"}
)");
  const auto run = read_run(temp / "demo");
  EXPECT_EQ(run.name, "demo");
  EXPECT_THAT(run.recipe, ElementsAre(Pair("model.path", "m"), Pair("train.steps", "3"), Pair("train.seed", "1"),
                                      Pair("data.train", "[a, b]"), Pair("lora", "null")));
  EXPECT_THAT(run.steps.step, ElementsAre(1, 2));
  EXPECT_THAT(run.steps.columns.at("loss"), ElementsAre(3.5, 2.5));  // the later line of step 2 counts
  EXPECT_THAT(run.steps.columns.at("lr"), ElementsAre(0.1, 0.3));
  EXPECT_EQ(run.steps.columns.at("parts.compute")[0], 0.5);
  EXPECT_EQ(run.steps.columns.at("communication_by_rank.1")[0], 0.5);
  EXPECT_TRUE(std::isnan(run.steps.columns.at("communication_by_rank.1")[1]));
  EXPECT_THAT(run.validation.columns.at("validation_loss"), ElementsAre(3.0));
  ASSERT_EQ(run.samples.size(), 1u);
  EXPECT_EQ(run.samples[0].text, "upon");
  ASSERT_EQ(run.warnings.size(), 2u);
  EXPECT_EQ(run.warnings[0].text, "careful");
  EXPECT_EQ(run.warnings[1].text, "restart 3: rank 1 of 2: ended by signal 9");
  ASSERT_EQ(run.sessions.size(), 1u);
  EXPECT_THAT(run.sessions[0].facts, ElementsAre(Pair("host", "a"), Pair("ranks", "2")));
  EXPECT_EQ(run.state, "done");
  EXPECT_THAT(run.notes,
              ElementsAre("2 lines of metrics.jsonl could not be read", "1 lines of events.jsonl could not be read"));
}

TEST(RunHistory, DistinguishesRunningFromKilledRuns) {
  const testing::TempFolder temp;
  write(temp / "run/metrics.jsonl", "{\"step\":1,\"loss\":1}\n");
  write(temp / "run/events.jsonl", "{\"step\":0,\"session\":{}}\n{\"step\":1,\"end\":\"asked to stop\"}\n");
  EXPECT_EQ(read_run(temp / "run").state, "asked to stop");
  write(temp / "run/events.jsonl",
        "{\"step\":0,\"session\":{}}\n{\"step\":1,\"end\":\"asked to stop\"}\n{\"step\":1,\"session\":{}}\n");
  EXPECT_THAT(read_run(temp / "run").state, HasSubstr("not running"));  // resumed, without further lines
  EXPECT_EQ(read_run(temp / "run").sessions.size(), 2u);
  write(temp / "run/.tessera/lock", "pid " + std::to_string(::getpid()) + " on " + host_name() + "\n");
  EXPECT_EQ(read_run(temp / "run").state, "running");
  write(temp / "run/events.jsonl", "{\"step\":0,\"session\":{}}\n{\"step\":1,\"end\":\"done\"}\n");
  EXPECT_EQ(read_run(temp / "run").state, "done") << "the pid is another process by now";
  write(temp / "run/events.jsonl", "{\"step\":0,\"session\":{}}\n");
  write(temp / "run/.tessera/lock", "pid 0 on " + host_name() + "\n");
  EXPECT_THAT(read_run(temp / "run").state, HasSubstr("not running"));
}

TEST(RunHistory, ReportsEarlyStopUntilTheRunContinues) {
  const testing::TempFolder temp;
  const std::string metrics = "{\"step\":2,\"loss\":1}\n{\"step\":2,\"early_stop\":\"no better\"}\n";
  write(temp / "run/metrics.jsonl", metrics);
  write(temp / "run/events.jsonl", "{\"step\":0,\"session\":{}}\n{\"step\":2,\"end\":\"done\"}\n");
  EXPECT_EQ(read_run(temp / "run").state, "ended early: no better");
  write(temp / "run/metrics.jsonl", metrics + "{\"step\":3,\"loss\":1}\n");
  EXPECT_EQ(read_run(temp / "run").state, "done");
}

TEST(RunHistory, KeepsOnlyPlottedValues) {
  const testing::TempFolder temp;
  std::string wide = "{\"step\":1,\"loss\":{\"a\":1},\"mine\":[";
  for (int i = 0; i < 1000; ++i) wide += "1,";
  wide += "1],\"communication_by_rank\":[";
  for (int i = 0; i < 1000; ++i) wide += "1,";
  write(temp / "run/metrics.jsonl", wide + "1]}\n");
  const auto run = read_run(temp / "run");
  EXPECT_EQ(run.steps.columns.size(), 65u);
  EXPECT_TRUE(std::isnan(run.steps.columns.at("loss")[0]));
  EXPECT_TRUE(run.grad_norm_z.empty());
}

TEST(RunHistory, UsesTheLastCompleteProfile) {
  const testing::TempFolder temp;
  write(temp / "run/metrics.jsonl", "{\"step\":9,\"loss\":1}\n");
  const std::string rank =
      R"({"rank":0,"compute":1.5,"communication":0.1,"wait":0.2,"data":0.1,"checkpoint":0,"hidden":0.5})";
  std::string ranks = rank;
  for (int i = 0; i < 100; ++i) ranks += "," + rank;
  const auto line = [](int step, const std::string& tables) {
    return fmt::format("{{\"step\":{},\"profile\":{{\"first_step\":4,\"last_step\":{},{}}}}}\n", step, step, tables);
  };
  write(temp / "run/events.jsonl",
        line(6, R"("ranks":[])") +
            line(9, R"("ranks":[)" + ranks +
                        R"(],"operations":[{"name":"mm","calls":3,"seconds":0.5}],"collectives":[{"name":"all_gather",)"
                        R"("group":"dp","calls":2,"bytes":64,"seconds":0.1}])") +
            line(12, R"("ranks":[{"rank":0}])") + line(15, R"("ranks":7)"));
  const auto run = read_run(temp / "run");
  EXPECT_THAT(run.notes, ElementsAre("2 lines of events.jsonl could not be read"));
  ASSERT_TRUE(run.profile.is_object());
  EXPECT_EQ(run.profile["last_step"], 9);
  EXPECT_EQ(run.profile["ranks"].size(), 64u);
  EXPECT_EQ(run.profile["ranks"][1].at("compute"), 1.5);
  ASSERT_EQ(run.profile["operations"].size(), 1u);
  EXPECT_EQ(run.profile["operations"][0].at("calls"), 3);
  ASSERT_EQ(run.profile["collectives"].size(), 1u);
  EXPECT_EQ(run.profile["collectives"][0].at("group"), "dp");
  EXPECT_EQ(run.profile["collectives"][0].at("bytes"), 64);
}

TEST(RunHistory, RefusesFoldersThatAreNoRun) {
  const testing::TempFolder temp;
  EXPECT_THAT(error_of(temp / "nowhere"), HasSubstr("nowhere: found no folder"));
  write(temp / "other/notes.txt", "mine");
  EXPECT_THAT(error_of(temp / "other"), HasSubstr("found no metrics.jsonl"));
}

TEST(RunHistory, FindsTheSettingsThatDiffer) {
  const testing::TempFolder temp;
  for (const std::string name : {"a", "b", "c"}) write(temp / name / "metrics.jsonl", "{\"step\":1,\"loss\":1}\n");
  write(temp / "a/recipe.yaml", "optimizer: {lr: 1, name: adamw}\ntrain: {seed: 1}\n");
  write(temp / "b/recipe.yaml", "optimizer: {lr: 2, name: adamw}\ntrain: {seed: 1}\n");
  write(temp / "c/recipe.yaml", "optimizer: {lr: 1, name: adamw, ns_steps: 5}\ntrain: {seed: 1}\n");
  EXPECT_THAT(differing_settings({read_run(temp / "a"), read_run(temp / "b"), read_run(temp / "c")}),
              ElementsAre("optimizer.lr", "optimizer.ns_steps"));
  EXPECT_TRUE(differing_settings({read_run(temp / "a")}).empty());
}

TEST(RunHistory, DownsamplingKeepsSpikesAndEnds) {
  MetricRows rows_of_steps({});
  for (int64_t step = 0; step < 10000; ++step) {
    double loss = 2 + 0.001 * static_cast<double>(step % 7);
    if (step == 4321) loss = 90;
    if (step == 7654) loss = std::numeric_limits<double>::quiet_NaN();
    rows_of_steps.put(step, {{"loss", loss}});
  }
  const MetricSeries steps = rows_of_steps.series();
  const auto rows = thinned_rows(steps, 400);
  EXPECT_LE(rows.size(), 400u);
  EXPECT_GE(rows.size(), 300u);
  EXPECT_TRUE(std::ranges::is_sorted(rows));
  EXPECT_EQ(rows.front(), 0u);
  EXPECT_EQ(rows.back(), 9999u);
  for (const size_t wanted : {4321u, 7654u}) EXPECT_THAT(rows, Contains(wanted));
  EXPECT_EQ(thinned_rows(steps, 10000).size(), 10000u);
}

}  // namespace
}  // namespace tessera::report
