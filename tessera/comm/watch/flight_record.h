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

// kLists: the ranks of a group one by one, as on disk. kRuns: "0-7999", "3,8-64:8", for a message to another rank,
// since a world of thousands sends thousands of them.
enum class RankLists : uint8_t { kLists, kRuns };
std::string to_json(const FlightRecord& record, RankLists lists = RankLists::kLists);
// Error kFormat names `source` and what is wrong.
FlightRecord parse_flight_record(std::string_view json, const std::string& source);

std::string flight_record_name(int rank);  // "flight-00003.json"
// "records-20261122T031500.123Z-1a2b3c4d": the folder of a run's records in a folder that serves many runs; later ones
// sort behind earlier ones, and no two are the same.
std::string new_records_name();
// The records of the last run that left some in `folder`, or those that lie in it directly when no run has.
std::filesystem::path last_records(const std::filesystem::path& folder);
// The records of last_records(folder) by rank; of each there is one, though some may be missing. Error kIo: no folder;
// kFormat: none in it, a file that is none, or of another run.
std::vector<FlightRecord> read_flight_records(const std::filesystem::path& folder);

}  // namespace tessera::comm
