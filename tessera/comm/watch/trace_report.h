// What flight records tell, in words: the output of `tessera trace`.
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
  std::string text;          // lines: the culprit first, then where each rank is
  std::vector<int> missing;  // ranks without a record
};

// `records` of one run, by rank; at least one.
TraceReport explain(const std::vector<FlightRecord>& records);

}  // namespace tessera::comm
