// Parses the lines of metrics.jsonl and events.jsonl and collects them by kind (docs/format/run.md).
//
//   RunLines lines({.rows = 16384, .events = 200});
//   if (!lines.add_line(R"({"step":1,"loss":4.5})")) ++skipped;
//   RunHistory run = lines.history();
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "tessera/report/metric_rows.h"

namespace tessera::report {

// Limits of memory. `rows`: steps that are kept (metric_rows.h). `events`: how many of the last samples, of the last
// warnings and of the last sessions are kept.
struct HistoryLimits {
  size_t rows = SIZE_MAX, events = SIZE_MAX;
};

class RunLines {
 public:
  explicit RunLines(HistoryLimits limits)
      : limits_(limits),
        steps_({.loss = "loss", .max_rows = limits.rows}),
        validation_({.loss = "validation_loss", .max_rows = limits.rows}) {}

  // Adds a line. Returns false if the line cannot be read or has none of the known keys.
  bool add_line(std::string_view line);
  // The history so far, without folder, name, recipe and notes. `state` is empty unless a line says how the run ended.
  RunHistory history() const;

 private:
  HistoryLimits limits_;
  MetricRows steps_, validation_;
  RunHistory history_;  // samples, warnings, sessions, profile, state
  std::optional<StepNote> early_stop_;
};

}  // namespace tessera::report
