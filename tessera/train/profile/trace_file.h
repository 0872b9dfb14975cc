// The trace of one rank in Chrome's format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.
//
//   publish_file(path, trace_json(recorder, collectives, {.rank = 3, .base_us = base}));
//
// docs/format/trace.md. Pure, thread-safe.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/watch/flight_record.h"
#include "tessera/train/profile/trace_recorder.h"

namespace tessera::train {

struct TraceCollective {
  comm::FlightCall call;  // times in microseconds since the epoch
  int64_t bytes = 0;      // that the best algorithm brings to this rank (comm/group/observer.h)
  bool own = true;        // of the training thread, which it holds up; else in the background, as a save's are
};

struct TraceFacts {
  int rank = 0;
  std::string host = {};
  int64_t first_step = 0, last_step = 0;
  int64_t base_us = 0;           // since the epoch: time 0 of the traces of all ranks
  int64_t steady_offset_us = 0;  // what to add to the steady clock for microseconds since the epoch
  int64_t lost_collectives = 0;  // that had left the flight recorder
};

std::string trace_json(const TraceRecorder& recorder, const std::vector<TraceCollective>& collectives,
                       const TraceFacts& facts);

}  // namespace tessera::train
