// The output of a run on stderr: one line per step, and on a terminal a progress bar below the lines.
//
//   Progress progress({.total_steps = 100, .first_step = 0, .terminal = stderr_is_terminal(), .colour = true});
//   progress.step({.step = 1, .loss = 2.5, ...});
//   progress.validation(20, 2.31);
//   progress.finish("saved runs/demo");
//
// Each line is one write(2), so that output of other ranks and logs cannot interleave. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tessera/train/output/step_metrics.h"

namespace tessera::train {

struct ProgressOptions {
  int64_t total_steps = 0;
  int64_t first_step = 0;  // steps that were done before the run was resumed
  int64_t every = 1;       // steps between lines; 0: no lines
  bool terminal = false;   // draw the bar
  bool colour = false;     // print outliers in colour
  int columns = 80;        // width of the terminal in characters
  // Receives the output; default: writes to stderr.
  std::function<void(std::string_view)> write = {};
};

// Returns the options for the stderr of this process. `terminal` is true if stderr is a terminal and TERM is not
// "dumb". `colour` is true if `terminal` is true and NO_COLOR is empty or not set. `columns` is the width of the
// terminal if it is known.
ProgressOptions progress_for_stderr();

class Progress {
 public:
  explicit Progress(ProgressOptions options);
  void step(const StepMetrics& metrics);
  void validation(int64_t step, double loss);
  void sample(int64_t step, std::string_view prompt, std::string_view text);  // texts without line breaks
  // Removes the progress bar and prints `last_line`.
  void finish(std::string_view last_line);

 private:
  void print(const std::string& line);
  std::string bar() const;

  ProgressOptions options_;
  int64_t done_ = 0;
  double seconds_per_step_ = 0;  // exponential moving average
};

// "step  12/100  loss 2.3456  norm 1.20  lr 1.0e-04  1234 tok/s  512 MiB  43% of peak  eta 1:05"
std::string format_step(const StepMetrics& metrics, const ProgressOptions& options, double eta_seconds);
// "0:05", "12:34", "1:02:03", "3d 04:00".
std::string format_duration(double seconds);

}  // namespace tessera::train
