// The lines of metrics.jsonl and events.jsonl, sorted by what they tell (docs/format/run.md).
//
//   RunLines lines({.rows = 16384, .events = 200});
//   if (!lines.take(R"({"step":1,"loss":4.5})")) ++skipped;
//   RunHistory run = lines.history();
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "tessera/report/step_rows.h"

namespace tessera::report {

// What is kept of a run; of steps see step_rows.h, of samples, warnings and sessions the last ones.
struct HistoryLimits {
  size_t rows = SIZE_MAX, events = SIZE_MAX;
};

class RunLines {
 public:
  explicit RunLines(HistoryLimits limits)
      : limits_(limits),
        steps_({.loss = "loss", .most = limits.rows}),
        validation_({.loss = "validation_loss", .most = limits.rows}) {}

  // False: it tells nothing.
  bool take(std::string_view line);
  // Everything but the names, the recipe and what could not be read. `state` is "" unless the run has said how it
  // ended.
  RunHistory history() const;

 private:
  HistoryLimits limits_;
  StepRows steps_, validation_;
  RunHistory told_;  // samples, warnings, sessions, profile, state
  std::optional<Note> early_stop_;
};

}  // namespace tessera::report
