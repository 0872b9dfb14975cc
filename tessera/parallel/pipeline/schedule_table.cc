#include "tessera/parallel/pipeline/schedule_table.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::pipeline {
namespace {

std::string cell_text(const ActionRow& row, size_t step) {
  return step < row.size() && row[step] ? row[step]->text() : std::string();
}

std::string_view unquoted(std::string_view cell) {
  const bool is_quoted = cell.size() >= 2 && cell.front() == '"' && cell.back() == '"';
  return is_quoted ? cell.substr(1, cell.size() - 2) : cell;
}

}  // namespace

std::vector<TableStep> steps_of(const ActionRow& row) {
  std::vector<TableStep> out;
  for (size_t column = 0; column < row.size(); ++column) {
    if (!row[column]) continue;
    for (auto& step : row[column]->steps()) out.push_back({std::move(step), column});
  }
  return out;
}

ScheduleTable ScheduleTable::from_csv(std::string_view csv, const std::string& name) {
  ScheduleTable table;
  while (!csv.empty()) {
    auto line = csv.substr(0, std::min(csv.find('\n'), csv.size()));
    csv.remove_prefix(std::min(line.size() + 1, csv.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    auto& row = table.ranks.emplace_back();
    for (bool more = true; more;) {
      const auto end = line.find(',');
      more = end != std::string_view::npos;
      try {
        row.push_back(Action::parse(unquoted(line.substr(0, end))));
      } catch (const Error& error) {
        raise(ErrorKind::kFormat, "[pipeline.schedule] {}: line {}, cell {}: {}", name, table.ranks.size(),
              row.size() + 1, error.what());
      }
      if (more) line.remove_prefix(end + 1);
    }
  }
  TESSERA_CHECK(!table.ranks.empty(), ErrorKind::kFormat,
                "[pipeline.schedule] {}: no line, wanted one for each rank of the pipeline", quote(name));
  return table;
}

std::string ScheduleTable::to_csv() const {
  std::string out;
  for (const auto& row : ranks) {
    for (size_t step = 0; step < row.size(); ++step) out += (step == 0 ? "" : ",") + cell_text(row, step);
    out += "\n";
  }
  return out;
}

// The text has the format of torch's _format_pipeline_order.
std::string ScheduleTable::to_text(std::optional<size_t> error_step) const {
  size_t steps = 0;
  for (const auto& row : ranks) steps = std::max(steps, row.size());
  const size_t digits = std::to_string(steps == 0 ? 0 : steps - 1).size();
  std::vector<std::string> lines = {std::string(digits + 7, ' ')};
  for (size_t step = 0; step < steps; ++step) lines.push_back(fmt::format("Step {:0{}}: ", step, digits));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<std::string> column = {fmt::format("Rank {}", rank)};
    for (size_t step = 0; step < steps; ++step) column.push_back(cell_text(ranks[rank], step));
    const size_t width = std::ranges::max(column, {}, &std::string::size).size();
    for (size_t i = 0; i < lines.size(); ++i) lines[i] += fmt::format("{:<{}} ", column[i], width);
  }
  if (error_step && *error_step < steps) lines[*error_step + 1] += "<-- ERROR HERE";
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

}  // namespace tessera::pipeline
