#include "tessera/comm/watch/flight_record.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFormat = "tessera.flight_record";
constexpr int kVersion = 1;
constexpr int kMaxRanks = 1 << 24;
constexpr uint64_t kMaxFileBytes = 64U << 20;
constexpr JsonLimits kRecordLimits{.max_bytes = kMaxFileBytes, .max_depth = 8, .max_keys = 1'000'000};

constexpr Op kOps[] = {Op::kAllReduce, Op::kAllGather, Op::kReduceScatter, Op::kBroadcast, Op::kScatter,
                       Op::kAllToAll,  Op::kSend,      Op::kRecv,          Op::kBarrier};
constexpr ReduceOp kReductions[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
constexpr CallState kStates[] = {CallState::kStarted, CallState::kWaiting, CallState::kFinished, CallState::kFailed};

std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }

json json_of(const FlightCall& call) {
  const Signature& signature = call.signature;
  json result = {{"group", signature.members},
                 {"sequence", signature.sequence},
                 {"op", to_string(signature.op)},
                 {"reduce", to_string(signature.reduce)},
                 {"dtype", dtype_name(signature.dtype)},
                 {"dims", signature.dims},
                 {"sizes", std::vector<int64_t>(signature.sizes,
                                                signature.sizes + std::min<int>(signature.dims, Signature::kMaxSizes))},
                 {"root", signature.root},
                 {"tag", signature.tag},
                 {"subject", signature.subject},
                 {"hash", hex(signature.hash)},
                 {"state", to_string(call.state)},
                 {"started_us", call.started_us},
                 {"waiting_us", call.waiting_us},
                 {"finished_us", call.finished_us}};
  return result;
}

// Returns the element of `values` whose to_string() is the JSON string.
template <class Value, size_t size>
Value named(const Value (&values)[size], const JsonReader& field, std::string_view expected) {
  const std::string name = field.as_string();
  for (const Value value : values) {
    if (name == to_string(value)) return value;
  }
  field.fail(expected);
}

int8_t dtype_named(const JsonReader& field) {
  const std::string name = field.as_string();
  if (name.empty()) return -1;
  for (int type = 0; type < static_cast<int>(c10::ScalarType::NumOptions); ++type) {
    if (name == dtype_name(type)) return static_cast<int8_t>(type);
  }
  field.fail("a dtype");
}

uint64_t hash_of_hex(const JsonReader& field) {
  const std::string digits = field.as_string();
  uint64_t hash = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), hash, 16);
  if (error != std::errc() || end != digits.data() + digits.size()) field.fail("hexadecimal digits");
  return hash;
}

// Encodes ranks as runs "first-last:step" (kRuns). At least three ranks with an equal, positive step make a run; other
// ranks are written one by one.
std::string runs_of(const std::vector<int>& ranks) {
  std::string text;
  for (size_t begin = 0; begin < ranks.size();) {
    const int step = begin + 1 < ranks.size() ? ranks[begin + 1] - ranks[begin] : 0;
    size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
    if (step <= 0 || end - begin < 3) end = begin + 1;
    text += fmt::format("{}{}", begin ? "," : "", ranks[begin]);
    if (end > begin + 1) text += fmt::format("-{}", ranks[end - 1]);
    if (end > begin + 1 && step > 1) text += fmt::format(":{}", step);
    begin = end;
  }
  return text;
}

// The inverse of runs_of(): returns the ranks that the text of `field` encodes. This text may come from a faulty peer,
// so every number must be a rank of the world. The number of ranks is bounded, too, so that a faulty text cannot use up
// the memory.
std::vector<int> ranks_of_runs(const JsonReader& field, int world_size) {
  const std::string runs = field.as_string();
  std::string_view text = runs;
  std::vector<int> ranks;
  const auto number = [&](char before) {
    if (before && !text.starts_with(before)) return -1;
    if (before) text.remove_prefix(1);
    int value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0 || value >= world_size) field.fail("ranks of the world");
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return value;
  };
  while (!text.empty()) {
    const int first = number(ranks.empty() ? '\0' : ',');
    if (first < 0) field.fail("runs of ranks");
    const int last = number('-'), step = last < 0 ? -1 : number(':');
    if (step == 0 || ranks.size() > static_cast<size_t>(world_size)) field.fail("runs of ranks");
    for (int rank = first; rank <= std::max(first, last); rank += std::max(step, 1)) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> ranks_of(const JsonReader& field, int world_size) {
  if (field.value().is_string()) return ranks_of_runs(field, world_size);
  std::vector<int> ranks;
  for (const auto& rank : field.items()) ranks.push_back(static_cast<int>(rank.as_integer(0, world_size - 1)));
  return ranks;
}

template <class Integer>
Integer integer_at(const JsonReader& entry, const char* key) {
  using Limits = std::numeric_limits<Integer>;
  return static_cast<Integer>(entry.integer(key, std::nullopt, Limits::min(), Limits::max()));
}

// A record may come from a faulty peer or a damaged file: every field is checked, and a call must belong to a group
// that the record lists.
FlightCall call_of(const JsonReader& entry, const std::vector<FlightGroup>& groups) {
  FlightCall call;
  Signature& signature = call.signature;
  signature.members = integer_at<uint32_t>(entry, "group");
  signature.sequence = entry.at("sequence").as_unsigned();
  signature.op = named(kOps, entry.at("op"), "an operation");
  signature.reduce = named(kReductions, entry.at("reduce"), "a reduction");
  signature.dtype = dtype_named(entry.at("dtype"));
  signature.dims = integer_at<uint8_t>(entry, "dims");
  const JsonReader list = entry.at("sizes");
  const auto sizes = list.items();
  if (sizes.size() != std::min<size_t>(signature.dims, Signature::kMaxSizes)) list.fail("as many as dims, at most 6");
  for (size_t dim = 0; dim < sizes.size(); ++dim) signature.sizes[dim] = sizes[dim].as_integer(INT64_MIN, INT64_MAX);
  signature.root = integer_at<int32_t>(entry, "root");
  signature.tag = integer_at<int32_t>(entry, "tag");
  put_text(signature.subject, entry.string("subject"));
  signature.hash = hash_of_hex(entry.at("hash"));
  call.state = named(kStates, entry.at("state"), "a state");
  call.started_us = integer_at<int64_t>(entry, "started_us");
  call.waiting_us = integer_at<int64_t>(entry, "waiting_us");
  call.finished_us = integer_at<int64_t>(entry, "finished_us");
  const auto group = std::ranges::find_if(groups, [&](const FlightGroup& one) { return one.id == signature.members; });
  if (group == groups.end()) entry.at("group").fail("a group that is listed");
  put_text(signature.group, group->name);
  return call;
}

FlightRecord record_of(const JsonReader& document) {
  if (document.string("format", "") != kFormat) document.fail(fmt::format("{}, version {}", kFormat, kVersion));
  document.integer("version", std::nullopt, kVersion, kVersion);
  FlightRecord record;
  record.world_size = static_cast<int>(document.integer("world_size", std::nullopt, 1, kMaxRanks));
  record.rank = static_cast<int>(document.integer("rank", std::nullopt, 0, record.world_size - 1));
  record.host = document.string("host");
  record.pid = integer_at<int64_t>(document, "pid");
  record.reason = document.string("reason");
  record.written_us = integer_at<int64_t>(document, "written_us");
  record.calls_made = document.at("calls_made").as_unsigned();
  for (const auto& entry : document.at("groups").items()) {
    record.groups.push_back({.id = integer_at<uint32_t>(entry, "id"),
                             .name = entry.string("name"),
                             .ranks = ranks_of(entry.at("ranks"), record.world_size)});
  }
  for (const auto& entry : document.at("calls").items()) record.calls.push_back(call_of(entry, record.groups));
  return record;
}

}  // namespace

const char* to_string(CallState state) noexcept {
  return enum_name(state, {"started", "waiting", "finished", "failed"});
}

std::string to_json(const FlightRecord& record, RankLists lists) {
  json groups = json::array(), calls = json::array();
  for (const FlightGroup& group : record.groups) {
    const json ranks = lists == RankLists::kRuns ? json(runs_of(group.ranks)) : json(group.ranks);
    groups.push_back({{"id", group.id}, {"name", group.name}, {"ranks", ranks}});
  }
  for (const FlightCall& call : record.calls) calls.push_back(json_of(call));
  const json document = {{"format", kFormat},
                         {"version", kVersion},
                         {"rank", record.rank},
                         {"world_size", record.world_size},
                         {"host", record.host},
                         {"pid", record.pid},
                         {"reason", record.reason},
                         {"written_us", record.written_us},
                         {"calls_made", record.calls_made},
                         {"groups", std::move(groups)},
                         {"calls", std::move(calls)}};
  return document.dump(-1, ' ', false, json::error_handler_t::replace);  // names are cut to bytes: UTF-8 may be cut
}

FlightRecord parse_flight_record(std::string_view text, const std::string& source) {
  const std::string where = "[comm.flight_record] " + source;
  try {
    const Json json = parse_json_object(text, where, kRecordLimits);
    return record_of(JsonReader(json, where));
  } catch (const Error& error) {
    raise(ErrorKind::kFormat,
          "{}. Wanted a flight record of Tessera (docs/format/flight-record.md). Was the rank killed while writing it?",
          error.what());
  }
}

std::string flight_record_name(int rank) { return fmt::format("flight-{:05}.json", rank); }

namespace {

constexpr const char* kRecords = "records-";

bool is_record(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with("flight-") && name.ends_with(".json");
}

}  // namespace

std::string new_records_name() {
  const auto now = std::chrono::system_clock::now();
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  return fmt::format("{}{:%Y%m%dT%H%M%S}.{:03}Z-{:08x}", kRecords,
                     fmt::gmtime(std::chrono::system_clock::to_time_t(now)), milliseconds, std::random_device()());
}

// Folder names sort by time (new_records_name), so the greatest name with a record in it is the last run. Folders
// without records are skipped: a run makes its folder only when a record is written, but a write may have failed.
fs::path last_records(const fs::path& folder) {
  std::error_code failed, ignored;
  fs::path last;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) {
    if (!entry->path().filename().string().starts_with(kRecords) || entry->path().filename() < last.filename()) {
      continue;
    }
    const fs::directory_iterator files(entry->path(), ignored);
    if (std::any_of(files, fs::directory_iterator(), [](const auto& file) { return is_record(file.path()); })) {
      last = entry->path();
    }
  }
  return last.empty() ? folder : last;
}

std::vector<FlightRecord> read_flight_records(const fs::path& parent) {
  const fs::path folder = last_records(parent);
  std::error_code failed;
  std::vector<fs::path> paths;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) {
    if (is_record(entry->path())) paths.push_back(entry->path());
  }
  TESSERA_CHECK(!failed, ErrorKind::kIo, "[comm.flight_record] {}: {}", folder.string(), failed.message());
  TESSERA_CHECK(!paths.empty(), ErrorKind::kFormat,
                "[comm.flight_record] {}: no flight-RANK.json in it. A run leaves them in its folder's trace/, or in "
                "TESSERA_TRACE_DIR.",
                folder.string());
  std::ranges::sort(paths);
  std::vector<FlightRecord> records;
  for (const auto& path : paths) {
    FlightRecord record = parse_flight_record(read_file(path, kMaxFileBytes), path.string());
    TESSERA_CHECK(path.filename() == flight_record_name(record.rank), ErrorKind::kFormat,
                  "[comm.flight_record] {}: holds the record of rank {}. Was it renamed?", path.string(), record.rank);
    TESSERA_CHECK(
        records.empty() || records.front().world_size == record.world_size, ErrorKind::kFormat,
        "[comm.flight_record] {}: from a run of {} ranks, the others are from a run of {}. Remove the files of "
        "the other run.",
        path.string(), record.world_size, records.front().world_size);
    records.push_back(std::move(record));
  }
  std::ranges::sort(records, [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return records;
}

}  // namespace tessera::comm
