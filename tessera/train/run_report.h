// What rank 0 tells of a run: metrics.jsonl, TensorBoard events and the lines on stderr.
//
//   RunReport report(recipe, folder, config, world_size, first_step, steps);
//   report.step(12, result, lr, seconds);
//   report.validation(12, 2.31, seconds);
//   report.finish("saved runs/demo/model");
//
// Not thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tessera/models/config.h"
#include "tessera/train/outliers.h"
#include "tessera/train/progress.h"
#include "tessera/train/recipe.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/step.h"
#include "tessera/train/tensorboard.h"

namespace tessera::train {

class RunReport {
 public:
  // Writes the resolved recipe; metrics after first_step are dropped. `folder` must outlive the report.
  RunReport(const Recipe& recipe, RunFolder& folder, const ModelConfig& config, int world_size, int64_t first_step,
            int64_t total_steps);
  void step(int64_t step, const StepResult& result, double lr, double seconds);
  void validation(int64_t step, double loss, double seconds);
  void sample(int64_t step, const std::string& prompt, const std::string& text);
  // The run ends before its last step, and why: a line of metrics.jsonl with "early_stop".
  void early_stop(int64_t step, const std::string& reason);
  void finish(const std::string& last_line);

 private:
  bool jsonl_;
  RunFolder& folder_;
  std::optional<EventWriter> events_;
  Progress progress_;
  OutlierDetector losses_, norms_;
  double flops_per_token_;
  double peak_flops_;  // of all ranks
};

}  // namespace tessera::train
