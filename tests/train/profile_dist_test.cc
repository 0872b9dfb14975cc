// Tests of train.profile: the traces of a real run are valid for trace viewers and for the report.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tessera/train/profile/trace_file.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Ge;
using ::testing::HasSubstr;

nlohmann::json trace(const TinyRun& runs, const std::string& dir, int rank) {
  return nlohmann::json::parse(read_file(runs / dir / "profile" / fmt::format("trace-{:05}.json", rank)));
}

nlohmann::json profile_event(const TinyRun& runs, const std::string& dir) {
  std::ifstream lines(runs / dir / "events.jsonl");
  nlohmann::json found;
  for (std::string line; std::getline(lines, line);) {
    auto json = nlohmann::json::parse(line);
    if (json.contains("profile")) found = json["profile"];
  }
  return found;
}

// Complete events of one thread are nested or disjoint. Trace viewers require this.
void expect_nested(const nlohmann::json& events) {
  std::map<int, std::vector<std::pair<double, double>>> open;
  for (const auto& event : events) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"], end = begin + event["dur"].get<double>();
    auto& outer = open[event["tid"]];
    while (!outer.empty() && outer.back().second <= begin + 1e-3) outer.pop_back();
    if (!outer.empty()) {
      ASSERT_LE(end, outer.back().second + 2e-3) << event;
    }
    outer.push_back({begin, end});
  }
}

TEST(RunProfile, EachRankTracesStepsWithModulesOperationsAndCollectives) {
  const TinyRun runs;
  const auto run = runs.train("traced", 2, {"train.profile=true", "parallel.dp_shard=2", "train.steps=8"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.err, AllOf(HasSubstr("steps 4 to 6 are in"), HasSubstr("ui.perfetto.dev")));
  for (const int rank : {0, 1}) {
    const auto json = trace(runs, "traced", rank);
    EXPECT_EQ(json["otherData"]["rank"], rank);
    EXPECT_EQ(json["otherData"]["dropped_events"], 0);
    std::map<std::string, std::set<std::string>> names;  // by category
    std::set<std::string> modules_of_operations;
    int64_t gathered_bytes = 0;
    bool backward_in_a_layer = false;
    for (const auto& event : json["traceEvents"]) {
      EXPECT_EQ(event["pid"], rank);
      if (!event.contains("cat")) continue;
      names[event["cat"]].insert(event["name"]);
      const auto args = event.value("args", nlohmann::json::object());
      if (args.contains("module")) {
        modules_of_operations.insert(args["module"]);
        backward_in_a_layer = backward_in_a_layer || (event["name"].get<std::string>().ends_with("Backward0") &&
                                                      args["module"].get<std::string>().starts_with("model.layers.1."));
      }
      if (event["cat"] == "collective" && event["ph"] == "b" && event["name"] == "all_gather") {
        gathered_bytes += args["bytes"].get<int64_t>();
        EXPECT_FALSE(args["group"].get<std::string>().empty());
      }
    }
    EXPECT_THAT(names["part"], AllOf(Contains("step 4"), Contains("step 6"), Contains("data")));
    EXPECT_EQ(names["part"].count("step 3") + names["part"].count("step 7"), 0u);
    EXPECT_THAT(names["module"], AllOf(Contains("model.layers.0.mlp"), Contains("model.layers.1.self_attn.q_proj")));
    EXPECT_THAT(modules_of_operations, Contains("model.layers.1.self_attn.q_proj"));
    EXPECT_TRUE(backward_in_a_layer);
    EXPECT_THAT(names["collective"], AllOf(Contains("all_gather"), Contains("reduce_scatter")));
    EXPECT_GT(gathered_bytes, 0);
    expect_nested(json["traceEvents"]);
  }
  const auto summary = profile_event(runs, "traced");
  EXPECT_EQ(summary["first_step"], 4);
  ASSERT_EQ(summary["ranks"].size(), 2u);
  double told_seconds = 0;
  for (const auto& line : runs.metrics("traced")) {
    if (line["step"] >= 4 && line["step"] <= 6) told_seconds += line["seconds"].get<double>();
  }
  double sum = 0;
  for (const char* part : {"compute", "communication", "wait", "data"}) sum += summary["ranks"][0][part].get<double>();
  EXPECT_NEAR(sum, told_seconds, 0.05 * told_seconds + 0.01);
  for (const char* table : {"operations", "modules", "collectives"}) {
    EXPECT_THAT(summary[table].size(), Ge(3u)) << table;
  }
  const auto report = testing::run_process(
      {testing::program(), "report", (runs / "traced").string(), "-o", (runs / "report.html").string()});
  ASSERT_EQ(report.exit_code, 0) << report.err;
  EXPECT_THAT(read_file(runs / "report.html"), HasSubstr("model.layers.*.mlp"));
}

TEST(RunProfile, DoesNotChangeTheRunAndWorksForShortRuns) {
  const TinyRun runs;
  const auto plain = runs.train("plain", 1, {"train.steps=2"});
  const auto traced = runs.train("traced", 1, {"train.steps=2", "train.profile=true"});
  ASSERT_EQ(traced.exit_code, 0) << traced.err;
  EXPECT_EQ(runs.weights("plain"), runs.weights("traced"));
  EXPECT_FALSE(std::filesystem::exists(runs / "plain" / "profile"));
  EXPECT_EQ(trace(runs, "traced", 0)["otherData"]["first_step"], 2);
  const auto checkpointed =
      runs.train("again", 1, {"train.steps=5", "train.profile=true", "parallel.activation_checkpointing=full"});
  ASSERT_EQ(checkpointed.exit_code, 0) << checkpointed.err;
  expect_nested(trace(runs, "again", 0)["traceEvents"]);
  const auto resumed = runs.train("again", 1, {"train.steps=9", "train.profile=true"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(trace(runs, "again", 0)["otherData"]["first_step"], 9);
}

TEST(RunProfile, CutOffProfileKeepsItsStepsAndIsReported) {
  const TinyRun runs;
  std::vector<std::string> settings = {"data.validation=[" + (runs / "held-out.jsonl").string() + "]",
                                       "train.validate_every=1",
                                       "train.early_stopping.min_delta=100",
                                       "train.profile=true",
                                       "train.early_stopping.patience=6",
                                       "train.steps=2"};
  const auto begun = runs.train("run", 1, settings);
  ASSERT_EQ(begun.exit_code, 0) << begun.err;
  settings.back() = "train.steps=9";
  for (const char* old : {"trace-00001.json", "trace-00007.json", "trace-00007.json.mine"}) {
    std::ofstream(runs / "run/profile" / old) << "{}";
  }
  const auto run = runs.train("run", 1, settings);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("[train.profile] cut off: the run ended before step 8"));
  EXPECT_EQ(trace(runs, "run", 0)["otherData"]["last_step"], 6);
  EXPECT_EQ(profile_event(runs, "run")["last_step"], 6);
  EXPECT_FALSE(std::filesystem::exists(runs / "run/profile/trace-00001.json")) << "of a start with more ranks";
  EXPECT_FALSE(std::filesystem::exists(runs / "run/profile/trace-00007.json"));
  EXPECT_TRUE(std::filesystem::exists(runs / "run/profile/trace-00007.json.mine"));
  settings[4] = "train.early_stopping.patience=2";
  const auto none = runs.train("none", 1, settings);
  ASSERT_EQ(none.exit_code, 0) << none.err;
  EXPECT_THAT(none.err, HasSubstr("[train.profile] nothing was traced: the run ended before step 4"));
}

TEST(TraceFile, AcceptsAHostNameThatIsNotUtf8) {
  const TraceRecorder recorder;
  const auto json = nlohmann::json::parse(trace_json(recorder, {}, {.rank = 2, .host = "h\xff"}));
  EXPECT_EQ(json["otherData"]["rank"], 2);
}

}  // namespace
}  // namespace tessera::train
