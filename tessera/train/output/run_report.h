// Reports the progress of a run on rank 0: metrics.jsonl, events.jsonl, TensorBoard events and lines on stderr.
//
//   RunReport report(recipe, folder, config, {.ranks = 2, .first_step = first_step, .total_steps = steps});
//   report.step({.step = 12, .lr = lr, .seconds = seconds}, result);
//   report.validation(12, 2.31, seconds);
//   report.finish("saved runs/demo/model");
//
// Not thread-safe.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "tessera/base/warning_log.h"
#include "tessera/models/config/config.h"
#include "tessera/train/output/outliers.h"
#include "tessera/train/output/progress.h"
#include "tessera/train/output/run_folder.h"
#include "tessera/train/output/tensorboard.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/step/step.h"

namespace tessera::train {

// Facts about one session of a run; a run that is resumed has several sessions.
struct SessionFacts {
  int ranks = 1;
  std::string layout = {};  // of describe_layout(): "dp_replicate 1 x dp_shard 2 x tp 2 x cp 1 x pp 1"
  std::string device = "cpu";
  int64_t first_step = 0;
  int64_t total_steps = 0;
  int64_t parameters = 0;                     // number of elements in the whole model
  std::shared_ptr<WarningLog> warnings = {};  // collects warnings, which the report writes to events.jsonl
};

class RunReport {
 public:
  // Writes the resolved recipe and opens the files; lines of steps after session.first_step are dropped. Measures the
  // matmul peak of this process. `folder` must outlive the report. Error kIo.
  RunReport(const Recipe& recipe, RunFolder& folder, const ModelConfig& config, const SessionFacts& session);
  // `metrics` holds the step, its learning rate and its seconds; all other fields are filled in from `result`.
  void step(StepMetrics metrics, const StepResult& result);
  void validation(int64_t step, double loss, double seconds);
  void sample(int64_t step, const std::string& prompt, const std::string& text);
  // `summary`: the JSON of StepProfile::end().
  void profile(int64_t step, const nlohmann::ordered_json& summary);
  // Reports that the run ends before its last step, for `reason`: as a line with "early_stop" in metrics.jsonl.
  void early_stop(int64_t step, const std::string& reason);
  void finish(int64_t step, const std::string& last_line);

 private:
  void write_warnings(int64_t step);

  bool jsonl_;
  RunFolder& folder_;
  std::optional<TensorBoardWriter> events_;
  Progress progress_;
  OutlierDetector losses_, norms_;
  std::shared_ptr<WarningLog> warnings_;
  double flops_per_token_;
  double peak_flops_;  // FLOP/s of all ranks
};

}  // namespace tessera::train
