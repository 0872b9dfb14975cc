// Flight record: the last collectives of one rank with their state and times, in memory and as JSON
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

// kStarted: the call is under way and the rank computes meanwhile. kWaiting: the rank is blocked in the call.
enum class CallState : uint8_t { kStarted, kWaiting, kFinished, kFailed };
const char* to_string(CallState state) noexcept;  // "started", "waiting", "finished", "failed"

struct FlightCall {
  Signature signature;
  CallState state = CallState::kStarted;
  int64_t started_us = 0;   // microseconds since the epoch
  int64_t waiting_us = 0;   // time of the wait; 0: the rank has not waited
  int64_t finished_us = 0;  // time of the end or failure; 0: not ended
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
  std::string reason;       // why the record was written: an error, or "SIGUSR2"
  int64_t written_us = 0;   // microseconds since the epoch
  uint64_t calls_made = 0;  // number of calls since the start; `calls` holds the last of them
  std::vector<FlightGroup> groups;
  std::vector<FlightCall> calls;  // oldest first
};

// Form of a group's ranks in JSON. kLists: a list of all ranks, used on disk. kRuns: text such as "0-7999" or
// "3,8-64:8" (first-last:step), used between watchdogs, because in a world of thousands of ranks each sends such a
// record.
enum class RankLists : uint8_t { kLists, kRuns };
std::string to_json(const FlightRecord& record, RankLists lists = RankLists::kLists);
// Reads a flight record from the JSON that to_json() returns. Error kFormat for any other text; the message names
// `source` and the fault.
FlightRecord parse_flight_record(std::string_view json, const std::string& source);

std::string flight_record_name(int rank);  // "flight-00003.json"
// Returns a new name for the folder of one run's records, such as "records-20261122T031500.123Z-1a2b3c4d" (UTC time and
// a random number). Names are unique, and later names sort after earlier ones.
std::string new_records_name();
// Returns the folder of the last run in `folder` that has left records, or `folder` itself when there is none.
std::filesystem::path last_records(const std::filesystem::path& folder);
// Reads the records in last_records(folder), ordered by rank, one per rank. Ranks may be missing. Error kIo: there is
// no folder; kFormat: it holds no record, a malformed record, or records of runs with different world sizes.
std::vector<FlightRecord> read_flight_records(const std::filesystem::path& folder);

}  // namespace tessera::comm
