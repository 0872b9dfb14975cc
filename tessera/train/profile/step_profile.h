// The profile of train.profile: each rank writes a trace of a few steps, and all ranks together make a summary of where
// the time went.
//
//   StepProfile profile(*model, world->group(), {.folder = run / "profile", .steps = profiled_steps(first, total)});
//   profile.begin(step);                          // COLLECTIVE over the group, like end()
//   { const TraceSpan span(profile.recorder(), "data"); ... }
//   if (auto summary = profile.end(step)) ...     // after the last profiled step: JSON, on all ranks
//
// Hooks and callbacks are installed only during the profiled steps; other steps have no cost. A StepProfile belongs to
// one rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/comm/group/observer.h"
#include "tessera/nn/module.h"
#include "tessera/train/profile/trace_file.h"

namespace tessera::train {

struct ProfiledSteps {
  int64_t first = 0, last = -1;  // both included; last < first: no step
};
// The profiled steps of a run that continues after `first_step`: three steps after three warm-up steps. If fewer than
// six steps are left, fewer steps are profiled, and if fewer than four are left, there are also fewer warm-up steps.
// The last step of such a run is always profiled.
ProfiledSteps profiled_steps(int64_t first_step, int64_t total_steps);

struct StepProfileOptions {
  std::filesystem::path folder;  // each rank writes trace-RANK.json (trace-00000.json) into it
  ProfiledSteps steps = {};
};

class StepProfile {
 public:
  // `group`: all ranks of the run.
  StepProfile(nn::Module& model, std::shared_ptr<comm::Group> group, StepProfileOptions options);
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  // Call begin() before and end() after each step. The first profiled step removes the traces of an earlier session.
  // After the last profiled step end() writes the trace and returns the summary of all ranks; otherwise it returns
  // nothing. A trace that cannot be written (full disk) is a warning and not an error. COLLECTIVE over the group.
  void begin(int64_t step);
  std::optional<nlohmann::ordered_json> end(int64_t step);
  // Call after the last step of the run. If the run ended before the last profiled step, logs a warning, writes the
  // trace of the steps recorded so far, and returns their summary, as end() does after the last profiled step. Returns
  // nothing if no step was recorded or if end() has returned the summary already. COLLECTIVE over the constructor's
  // `group`.
  std::optional<nlohmann::ordered_json> finish();
  TraceRecorder* recorder() { return &recorder_; }

  // Adds `seconds` of a profiled step to a part: "data" (making the batch), "snapshot" (waiting until a save has copied
  // the tensors) or "checkpoint" (saving after the previous step).
  void add_seconds(const std::string& part, double seconds);

 private:
  struct CollectiveBytes;  // bytes of each collective, from an observer
  void hook_modules();
  void unhook_modules();
  void read_collectives();
  void remove_old_traces(size_t ranks) const;
  nlohmann::ordered_json close();
  nlohmann::ordered_json own_summary();
  nlohmann::ordered_json summary_of_all();
  void write() const;

  nn::Module& model_;
  std::shared_ptr<comm::Group> group_;
  StepProfileOptions options_;
  TraceRecorder recorder_;
  std::vector<std::pair<nn::Module*, std::vector<int>>> hooks_;
  std::unique_ptr<CollectiveBytes> collective_bytes_;
  std::vector<TraceCollective> collectives_;
  std::map<std::string, double> seconds_;  // by part of a step
  TraceMetadata metadata_;
  bool closed_ = false;
  int64_t ended_ = -1;    // the last step that was recorded completely; -1: none
  int64_t begun_ns_ = 0;  // steady clock at begin()
  // communication_seconds_at_begin_ is the value of comm::communication_seconds() at begin(). in_progress_seconds_ is
  // the time, summed over the profiled steps, during which at least one collective of the training thread was in
  // progress.
  double communication_seconds_at_begin_ = 0, in_progress_seconds_ = 0;
  uint64_t calls_made_ = 0;  // calls of the flight recorder at begin()
};

}  // namespace tessera::train
