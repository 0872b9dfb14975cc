#include "tessera/comm/watch/trace_report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "tessera/comm/watch/diagnosis.h"

namespace tessera::comm {
namespace {

constexpr size_t kShownRanks = 64;

// Lists each distinct FlightRecord::reason with the ranks whose records have it. In most records the reason is the
// common failure report.
std::string reasons(const std::vector<FlightRecord>& records) {
  std::map<std::string, std::vector<int>> said;
  for (const FlightRecord& record : records) said[record.reason].push_back(record.rank);
  std::string text;
  for (const auto& [reason, ranks] : said) {
    const std::vector<int> shown(ranks.begin(),
                                 ranks.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(ranks.size(), 8)));
    text +=
        fmt::format("  rank {}{}: {}\n", fmt::join(shown, ", "), ranks.size() > shown.size() ? ", ..." : "", reason);
  }
  return text;
}

}  // namespace

// The diagnosis is the same search that rank 0 makes during a run (diagnosis.h); here a rank without a record counts as
// silent. At most 64 ranks are listed one by one.
TraceReport explain(const std::vector<FlightRecord>& records) {
  TraceReport report;
  const int size = records.front().world_size;
  for (int rank = 0; rank < size; ++rank) {
    if (!std::ranges::binary_search(records, rank, {}, &FlightRecord::rank)) report.missing.push_back(rank);
  }
  const Diagnosis diagnosis = diagnose(records);
  report.text = fmt::format("culprit: {}\nfinding: {}\nwritten because:\n{}where each rank is:\n",
                            diagnosis.culprit < 0 ? "none alone" : fmt::format("rank {}", diagnosis.culprit),
                            diagnosis.text, reasons(records));
  for (size_t i = 0; i < std::min(records.size(), kShownRanks); ++i) {
    report.text += fmt::format("  {}\n", describe_open_call(records[i]));
  }
  if (records.size() > kShownRanks) report.text += fmt::format("  and {} more\n", records.size() - kShownRanks);
  if (!report.missing.empty()) {
    report.text += fmt::format("without a record: rank {}\n", fmt::join(report.missing, ", "));
  }
  return report;
}

}  // namespace tessera::comm
