// train.profile: a trace of a few steps on each rank, and where their time went.
//
//   StepProfile profile(*model, world->group(), {.folder = run / "profile", .steps = profiled_steps(first, total)});
//   profile.begin(step);                          // COLLECTIVE over the group, as end()
//   { const TraceSpan span(profile.recorder(), "data"); ... }
//   if (auto summary = profile.end(step)) ...     // behind the last profiled step: JSON, on all ranks
//
// Outside the profiled steps it costs nothing: hooks and callbacks are there only while they last. Belongs to one rank.
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
  int64_t first = 0, last = -1;
};
// Of a run that goes on after `first_step`: three steps behind a warm-up of three, or what there is of them.
ProfiledSteps profiled_steps(int64_t first_step, int64_t total_steps);

struct StepProfileOptions {
  std::filesystem::path folder;  // trace-00000.json of each rank goes there
  ProfiledSteps steps = {};
};

class StepProfile {
 public:
  // `group`: all ranks of the run.
  StepProfile(nn::Module& model, std::shared_ptr<comm::Group> group, StepProfileOptions options);
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  // Around a step. After the last one the traces are written (a disk that is full costs the trace, with a warning, not
  // the run) and end() gives the summary of all ranks. Traces that an earlier start left are removed by the first.
  void begin(int64_t step);
  std::optional<nlohmann::ordered_json> end(int64_t step);
  // COLLECTIVE. After the run's last step: where that came before the last profiled one, as end() for those that there
  // were, with a warning.
  std::optional<nlohmann::ordered_json> finish();
  TraceRecorder* recorder() { return &recorder_; }

  // What of a step went into making its batch, and into saving behind the step before.
  void count(const std::string& part, double seconds);

 private:
  struct Bytes;  // what observers are told, by call
  void hook_modules();
  void unhook_modules();
  void take_collectives();
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
  std::unique_ptr<Bytes> bytes_;
  std::vector<TraceCollective> collectives_;
  std::map<std::string, double> seconds_;  // by part
  TraceFacts facts_;
  bool closed_ = false;
  int64_t ended_ = -1;  // the last step that is recorded whole
  int64_t begun_ns_ = 0;
  double communicated_ = 0, under_way_ = 0;
  uint64_t calls_made_ = 0;
};

}  // namespace tessera::train
