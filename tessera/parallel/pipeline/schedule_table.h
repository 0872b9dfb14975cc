// Pipeline schedules as data: the actions of each rank in order.
//
//   ScheduleTable table = ScheduleTable::from_csv(text, "schedule.csv");
//   std::fputs(table.to_text().c_str(), stdout);
//
// A table of computations has one column per time step, and empty cells for bubbles. A lowered table (lowering.h) has
// no time steps and no bubbles. A value type. No communication.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/parallel/pipeline/action.h"

namespace tessera::pipeline {

using ActionRow = std::vector<std::optional<Action>>;  // nullopt: a bubble

struct TableStep {
  Action action;
  size_t column;
};
// The actions of a row without bubbles; the parts of an overlap are listed one by one.
std::vector<TableStep> steps_of(const ActionRow& row);

struct ScheduleTable {
  std::vector<ActionRow> ranks;

  // Parses torch's CSV format: one line per rank, cells separated by commas, an empty cell for a bubble. Error kFormat
  // names the line and the cell.
  static ScheduleTable from_csv(std::string_view csv, const std::string& name);
  std::string to_csv() const;
  // Prints the table with one line per time step and one column per rank. The line of error_step is marked.
  std::string to_text(std::optional<size_t> error_step = std::nullopt) const;
  bool operator==(const ScheduleTable&) const = default;
};

}  // namespace tessera::pipeline
