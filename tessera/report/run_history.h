// The history of a run, read from its folder (docs/format/run.md) for a report. Nothing is locked or written, so the
// run may still be running, or may have been killed.
//
//   const RunHistory run = read_run("runs/demo");
//   run.steps.loss.back();
//
// No communication.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tessera::report {

inline constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

// One value per step; kMissing where metrics.jsonl has null or no value.
struct MetricSeries {
  std::vector<int64_t> step;
  std::map<std::string, std::vector<double>> columns;  // "loss", "grad_norm", ...: each as long as `step`
};

struct GeneratedSample {
  int64_t step = 0;
  std::string prompt, text;
};

struct StepNote {
  int64_t step = 0;
  std::string text;
};

// One session of the run: its first start, or a start that resumed it.
struct RunSession {
  int64_t first_step = 0;
  std::vector<std::pair<std::string, std::string>> facts;  // "version", "host", "ranks", ... of events.jsonl
};

struct RunHistory {
  std::filesystem::path folder;
  std::string name;                                         // name of the folder
  std::vector<std::pair<std::string, std::string>> recipe;  // "section.key" and its value in YAML, in file order
  MetricSeries steps;
  size_t step_count = 0;  // number of steps, including those that HistoryLimits dropped
  // z-scores as the run computed them (train/output/outliers.h): one per entry of steps.step, or empty. NaN for a step
  // with too few values before it.
  std::vector<double> loss_z, grad_norm_z;
  MetricSeries validation;
  std::vector<GeneratedSample> samples;
  std::vector<StepNote> warnings;
  std::vector<RunSession> sessions;
  // The last profile of train.profile in events.jsonl; null if there is none. An object with "first_step", "last_step";
  // "ranks": for each rank "rank", seconds by part, and "hidden", the share of collectives that overlapped with
  // compute; "operations", "modules" and "collectives" of rank 0, the longest first: "name", "group", "calls",
  // "seconds", "bytes".
  nlohmann::ordered_json profile;
  // "running", "not running: ...", "ended early: ..." (early stopping), or the last line that the run printed ("done,
  // ...").
  std::string state;
  std::vector<std::string> notes;  // for example "3 lines of metrics.jsonl could not be read"
};

// Reads metrics, events and recipe. If a step occurs twice (a resumed run whose earlier lines were not dropped), the
// last line counts. Lines that cannot be read are counted in `notes`; an incomplete last line is left out. Error
// kConfig for a folder that is not a run's; kIo; kFormat for a file above 1 GiB.
RunHistory read_run(const std::filesystem::path& folder);

// The keys whose values are not the same in the recipes of all runs, in the order of the first recipe. A missing key
// counts as null.
std::vector<std::string> differing_settings(const std::vector<RunHistory>& runs);

// Row indices, ascending, of at most `max_rows` rows to draw: the first, the last, and from each of equal ranges of
// rows those with the smallest and the largest loss, so that a spike is never dropped. A `max_rows` below 4
// counts as 4.
std::vector<size_t> thinned_rows(const MetricSeries& steps, size_t max_rows);

}  // namespace tessera::report
