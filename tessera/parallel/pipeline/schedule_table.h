// What each rank of a pipeline does, in order: schedules as data.
//
//   ScheduleTable table = ScheduleTable::from_csv(text, "schedule.csv");
//   std::fputs(table.to_text().c_str(), stdout);
//
// A table of computations has a column for each time step, with bubbles; a lowered one (lowering.h) has neither steps
// nor bubbles. A value. No communication.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/parallel/pipeline/action.h"

namespace tessera::pipeline {

using ActionRow = std::vector<std::optional<Action>>;  // nothing: a bubble

struct RowStep {
  Action action;
  size_t column;
};
// The actions of a row, without bubbles, the parts of an overlap one by one.
std::vector<RowStep> steps_of(const ActionRow& row);

struct ScheduleTable {
  std::vector<ActionRow> ranks;

  // torch's form: a line a rank, cells between commas, an empty one is a bubble. Error kFormat names line and cell.
  static ScheduleTable from_csv(std::string_view csv, const std::string& name);
  std::string to_csv() const;
  // A line a time step, a column a rank. error_step: marked.
  std::string to_text(std::optional<size_t> error_step = std::nullopt) const;
  bool operator==(const ScheduleTable&) const = default;
};

}  // namespace tessera::pipeline
