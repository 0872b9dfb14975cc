// What a run left in its folder (docs/format/run.md), for a report. Nothing is locked or written, so that the run may
// be at work, or have been killed.
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

inline constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

// One value a step; kNothing where metrics.jsonl has null or nothing.
struct Series {
  std::vector<int64_t> step;
  std::map<std::string, std::vector<double>> columns;  // "loss", "grad_norm", ...: each as long as `step`
};

struct Sample {
  int64_t step = 0;
  std::string prompt, text;
};

struct Note {
  int64_t step = 0;
  std::string text;
};

// A start of the run: the first, or one that resumed it.
struct Session {
  int64_t first_step = 0;
  std::vector<std::pair<std::string, std::string>> facts;  // "version", "host", "ranks", ... as events.jsonl has them
};

struct RunHistory {
  std::filesystem::path folder;
  std::string name;                                         // of the folder
  std::vector<std::pair<std::string, std::string>> recipe;  // "section.key" and its value as YAML has it, in file order
  Series steps;
  size_t steps_told = 0;  // as many, and those that are not kept (run_follower.h)
  // z-scores as the run saw them (train/output/outliers.h), as long as steps.step, or empty; NaN while there are few
  // values.
  std::vector<double> loss_z, grad_norm_z;
  Series validation;
  std::vector<Sample> samples;
  std::vector<Note> warnings;
  std::vector<Session> sessions;
  // Where the time of a few steps went (train.profile), the last one that events.jsonl has; null: none. An object:
  // "first_step", "last_step"; "ranks": of each rank "rank", seconds by part and "hidden", a share of collectives;
  // "operations", "modules" and "collectives" of rank 0, the longest first: "name", "group", "calls", "seconds",
  // "bytes".
  nlohmann::ordered_json profile;
  std::string state;               // "running", "ended", "stopped early: ...", "not running"
  std::vector<std::string> notes;  // what could not be read: "3 lines of metrics.jsonl tell nothing"
};

// Of a step that is there twice (a resumed run whose lines were not dropped) the last line counts. Lines that cannot be
// read are counted in `notes`, a torn last line is left out. Errors: kConfig for a folder that is no run's; kIo;
// kFormat for a file of over 1 GiB.
RunHistory read_run(const std::filesystem::path& folder);

// Keys of recipes whose values are not the same in all runs, in the order of the first; a key that a run does not have
// counts as null.
std::vector<std::string> differing_settings(const std::vector<RunHistory>& runs);

// At most `most` rows, among them the first, the last, and of each stretch the rows with the least and the largest
// loss, so that a spike is never thinned out. The rows' indices, ascending.
std::vector<size_t> thinned(const Series& steps, size_t most);

}  // namespace tessera::report
