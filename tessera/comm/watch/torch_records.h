// Converts flight records to the format of PyTorch's analyzer (torchfrtrace, torch.distributed.flight_recorder).
//
//   write_torch_records(read_flight_records("runs/demo/trace"), "for-torch");      // tessera_trace_rank_0, ...
//   // torchfrtrace for-torch
//
// Thread-safe.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

// Returns the pickle of one rank's record, in version 2.10 of the format of c10d's flight recorder.
std::string to_torch_pickle(const FlightRecord& record);
// Writes the record of each rank to a file of its own in `folder`, as the pickle that to_torch_pickle() returns. Error
// kIo unless `folder` is new or empty.
void write_torch_records(const std::vector<FlightRecord>& records, const std::filesystem::path& folder);

}  // namespace tessera::comm
