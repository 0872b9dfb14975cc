// Explains flight records in words: the output of `tessera trace`.
//
//   const TraceReport report = explain(read_flight_records(folder));
//   std::fputs(report.text.c_str(), stdout);
//
// Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

struct TraceReport {
  std::string text;          // lines: first the rank that is the cause, then the state of each rank
  std::vector<int> missing;  // ranks without a record
};

// `records`: at least one flight record, all of one run and ordered by rank.
TraceReport explain(const std::vector<FlightRecord>& records);

}  // namespace tessera::comm
