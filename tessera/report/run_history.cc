#include "tessera/report/run_history.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/base/error.h"
#include "tessera/report/run_follower.h"

namespace tessera::report {
namespace {

namespace fs = std::filesystem;
constexpr uintmax_t kMostBytes = uintmax_t{1} << 30;

}  // namespace

RunHistory read_run(const fs::path& folder) {
  for (const char* name : {"metrics.jsonl", "events.jsonl"}) {
    std::error_code missing;
    const auto bytes = fs::file_size(folder / name, missing);
    TESSERA_CHECK(missing || bytes <= kMostBytes, ErrorKind::kFormat,
                  "[report] {}: found {} bytes, wanted 1 GiB at most.", (folder / name).string(), bytes);
  }
  return RunFollower(folder, {}).history();
}

std::vector<std::string> differing_settings(const std::vector<RunHistory>& runs) {
  std::vector<std::string> keys;
  std::set<std::string> known;
  // All keys of all runs, in the order of the first run; keys that only later runs have come at the end.
  for (const auto& run : runs) {
    for (const auto& [key, value] : run.recipe) {
      if (known.insert(key).second) keys.push_back(key);
    }
  }
  const auto value_of = [](const RunHistory& run, const std::string& key) -> std::string {
    const auto found = std::ranges::find_if(run.recipe, [&](const auto& row) { return row.first == key; });
    return found == run.recipe.end() ? "null" : found->second;
  };
  std::erase_if(keys, [&](const std::string& key) {
    return std::ranges::all_of(
        runs, [&](const RunHistory& run) { return value_of(run, key) == value_of(runs.front(), key); });
  });
  return keys;
}

std::vector<size_t> thinned_rows(const MetricSeries& steps, size_t max_rows) {
  const size_t count = steps.step.size();
  std::vector<size_t> kept;
  if (count <= max_rows) {
    for (size_t row = 0; row < count; ++row) kept.push_back(row);
    return kept;
  }
  const auto found = steps.columns.find("loss");
  // Returns the loss of a row. A loss that is not finite or is missing is returned as infinity. The loop below keeps
  // the row with the largest loss of each range, so a range with such losses keeps one of these rows.
  const auto loss = [&](size_t row) {
    const double value = found == steps.columns.end() ? kMissing : found->second[row];
    return std::isfinite(value) ? value : std::numeric_limits<double>::infinity();
  };
  // The rows are divided into `stretches` ranges. Each range adds at most two rows, and the first and the last of all
  // rows are added. Together these are at most `max_rows` rows if max_rows >= 4.
  const size_t stretches = std::max<size_t>(max_rows / 2, 2) - 1;
  std::set<size_t> rows = {0, count - 1};
  for (size_t stretch = 0; stretch < stretches; ++stretch) {
    const size_t begin = count * stretch / stretches, end = count * (stretch + 1) / stretches;
    size_t least = begin, largest = begin;
    for (size_t row = begin; row < end; ++row) {
      if (loss(row) < loss(least)) least = row;
      if (loss(row) > loss(largest)) largest = row;
    }
    rows.insert({least, largest});
  }
  return {rows.begin(), rows.end()};
}

}  // namespace tessera::report
