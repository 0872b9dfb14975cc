// Formats the trace of one rank as Chrome trace JSON, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.
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
  comm::FlightCall call;  // its times are in microseconds since the epoch
  int64_t bytes = 0;      // bytes that this rank receives with the best algorithm (comm/group/observer.h)
  // Whether the training thread called the collective; false: a background thread, such as that of a save, called it.
  bool on_training_thread = true;
};

struct TraceMetadata {
  int rank = 0;
  std::string host = {};
  int64_t first_step = 0, last_step = 0;
  int64_t base_us = 0;           // time 0 of the traces of all ranks, in microseconds since the epoch
  int64_t steady_offset_us = 0;  // steady clock + this = microseconds since the epoch
  int64_t lost_collectives = 0;  // collectives that the flight recorder no longer had
};

// Returns the whole text of the trace file. The events of `recorder` become spans on the row of their thread. Each
// collective becomes an asynchronous span from its start to its end. If a thread waited for the collective, the time of
// the wait becomes another span, on a row for waits.
std::string trace_json(const TraceRecorder& recorder, const std::vector<TraceCollective>& collectives,
                       const TraceMetadata& metadata);

}  // namespace tessera::train
