// What one rank knew of its collectives when it was asked: the flight record, in memory and as JSON
// (docs/format/flight-record.md).
//
//   for (const auto& record : read_flight_records("runs/a/trace")) ...     // tessera trace
//
// Thread-safe: plain values.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/group/signature.h"

namespace tessera::comm {

// kStarted: under way, the rank computes meanwhile. kWaiting: the rank is blocked in it.
enum class CallState : uint8_t { kStarted, kWaiting, kFinished, kFailed };
const char* to_string(CallState state) noexcept;  // "started", "waiting", "finished", "failed"

struct FlightCall {
  Signature signature;
  CallState state = CallState::kStarted;
  int64_t started_us = 0;  // since the epoch; 0: not yet
  int64_t waiting_us = 0;
  int64_t finished_us = 0;
};

struct FlightGroup {
  uint32_t id = 0;  // Signature::members
  std::string name;
  std::vector<int> ranks;  // global
};

struct FlightRecord {
  int rank = 0;
  int world_size = 1;
  std::string host;
  int64_t pid = 0;
  std::string reason;  // why it was written
  int64_t written_us = 0;
  uint64_t calls_made = 0;  // in all; `calls` are the last of them
  std::vector<FlightGroup> groups;
  std::vector<FlightCall> calls;  // oldest first
};

std::string to_json(const FlightRecord& record);
// Error kFormat names `source` and what is wrong.
FlightRecord parse_flight_record(std::string_view json, const std::string& source);

std::string flight_record_name(int rank);  // "flight-00003.json"
// The records of a folder by rank; of each there is one, though some may be missing. Error kIo: no folder; kFormat:
// none in it, a file that is none, or of another run.
std::vector<FlightRecord> read_flight_records(const std::filesystem::path& folder);

}  // namespace tessera::comm
