// What a run shows on stderr: one line a step, and on a terminal a bar below that moves.
//
//   Progress progress({.total_steps = 100, .first_step = 0, .terminal = stderr_is_terminal(), .colour = true});
//   progress.step({.step = 1, .loss = 2.5, ...});
//   progress.validation(20, 2.31);
//   progress.finish("saved runs/demo");
//
// Lines are whole write(2)s, so ranks and logs do not cut into them. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tessera/train/output/step_metrics.h"

namespace tessera::train {

struct ProgressOptions {
  int64_t total_steps = 0;
  int64_t first_step = 0;  // steps a resumed run does not do again
  int64_t every = 1;       // steps between lines; 0: none
  bool terminal = false;   // draw the bar
  bool colour = false;     // colours for outliers; NO_COLOR and dumb terminals say no
  int columns = 80;        // of the terminal
  // Where text goes; default: stderr.
  std::function<void(std::string_view)> write = {};
};

// Options for this process's stderr: terminal, colour and columns as it has them.
ProgressOptions progress_for_stderr();

class Progress {
 public:
  explicit Progress(ProgressOptions options);
  void step(const StepMetrics& metrics);
  void validation(int64_t step, double loss);
  void sample(int64_t step, std::string_view prompt, std::string_view text);  // each without line breaks
  // Removes the bar and prints the last line.
  void finish(std::string_view last_line);

 private:
  void print(const std::string& line);
  std::string bar() const;

  ProgressOptions options_;
  int64_t done_ = 0;
  double seconds_per_step_ = 0;  // smoothed
};

// "step  12/100  loss 2.3456  norm 1.20  lr 1.0e-04  1234 tok/s  512 MiB  43% of peak  eta 1:05"
std::string format_step(const StepMetrics& metrics, const ProgressOptions& options, double eta_seconds);
// "0:05", "12:34", "1:02:03", "3d 04:00".
std::string format_duration(double seconds);

}  // namespace tessera::train
