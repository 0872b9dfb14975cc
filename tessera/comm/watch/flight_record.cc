#include "tessera/comm/watch/flight_record.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFormat = "tessera.flight_record";
constexpr int kVersion = 1;
constexpr int kMaxRanks = 1 << 24;
constexpr uint64_t kMaxFileBytes = 64U << 20;

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

// The value of `values` that is called `name`.
template <class Value, size_t size>
Value named(const Value (&values)[size], const std::string& name) {
  for (const Value value : values) {
    if (name == to_string(value)) return value;
  }
  throw std::invalid_argument(fmt::format("unknown '{}'", name.substr(0, 40)));
}

int dtype_named(const std::string& name) {
  if (name.empty()) return -1;
  for (int type = 0; type < static_cast<int>(c10::ScalarType::NumOptions); ++type) {
    if (name == dtype_name(type)) return type;
  }
  throw std::invalid_argument(fmt::format("unknown dtype '{}'", name.substr(0, 40)));
}

template <size_t size>
void put(char (&field)[size], const std::string& text) {
  std::memcpy(field, text.data(), std::min(text.size(), size - 1));
}

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

std::vector<int> ranks_of_runs(std::string_view text, int world_size) {
  std::vector<int> ranks;
  const auto number = [&](char before) {
    if (before && !text.starts_with(before)) return -1;
    if (before) text.remove_prefix(1);
    int value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0 || value >= world_size)
      throw std::invalid_argument("a group with foreign ranks");
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return value;
  };
  while (!text.empty()) {
    const int first = number(ranks.empty() ? '\0' : ',');
    if (first < 0) throw std::invalid_argument("a group with no list of ranks");
    const int last = number('-'), step = last < 0 ? -1 : number(':');
    if (step == 0 || ranks.size() > static_cast<size_t>(world_size))
      throw std::invalid_argument("a group with no list of ranks");
    for (int rank = first; rank <= std::max(first, last); rank += std::max(step, 1)) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> ranks_of(const json& said, int world_size) {
  return said.is_string() ? ranks_of_runs(said.get<std::string>(), world_size) : said.get<std::vector<int>>();
}

FlightCall call_of(const json& entry, const std::vector<FlightGroup>& groups) {
  FlightCall call;
  Signature& signature = call.signature;
  signature.members = entry.at("group").get<uint32_t>();
  signature.sequence = entry.at("sequence").get<uint64_t>();
  signature.op = named(kOps, entry.at("op").get<std::string>());
  signature.reduce = named(kReductions, entry.at("reduce").get<std::string>());
  signature.dtype = static_cast<int8_t>(dtype_named(entry.at("dtype").get<std::string>()));
  signature.dims = entry.at("dims").get<uint8_t>();
  const auto sizes = entry.at("sizes").get<std::vector<int64_t>>();
  if (sizes.size() != std::min<size_t>(signature.dims, Signature::kMaxSizes))
    throw std::invalid_argument("sizes do not fit dims");
  std::copy(sizes.begin(), sizes.end(), signature.sizes);
  signature.root = entry.at("root").get<int32_t>();
  signature.tag = entry.at("tag").get<int32_t>();
  put(signature.subject, entry.at("subject").get<std::string>());
  const auto hash = entry.at("hash").get<std::string>();
  size_t read = 0;
  signature.hash = std::stoull(hash, &read, 16);
  if (read != hash.size()) throw std::invalid_argument("hash is not hexadecimal");
  call.state = named(kStates, entry.at("state").get<std::string>());
  call.started_us = entry.at("started_us").get<int64_t>();
  call.waiting_us = entry.at("waiting_us").get<int64_t>();
  call.finished_us = entry.at("finished_us").get<int64_t>();
  const auto group =
      std::find_if(groups.begin(), groups.end(), [&](const FlightGroup& one) { return one.id == signature.members; });
  if (group == groups.end()) throw std::invalid_argument("a call in a group that is not listed");
  put(signature.group, group->name);
  return call;
}

FlightRecord record_of(const json& document) {
  if (!document.is_object() || document.value("format", "") != kFormat) throw std::invalid_argument("no flight record");
  if (document.at("version") != kVersion)
    throw std::invalid_argument("another version than 1");
  FlightRecord record;
  record.rank = document.at("rank").get<int>();
  record.world_size = document.at("world_size").get<int>();
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < record.world_size; };
  if (record.world_size > kMaxRanks || !is_rank(record.rank)) {
    throw std::invalid_argument(fmt::format("rank {} of {}", record.rank, record.world_size));
  }
  record.host = document.at("host").get<std::string>();
  record.pid = document.at("pid").get<int64_t>();
  record.reason = document.at("reason").get<std::string>();
  record.written_us = document.at("written_us").get<int64_t>();
  record.calls_made = document.at("calls_made").get<uint64_t>();
  for (const json& entry : document.at("groups")) {
    FlightGroup group{entry.at("id").get<uint32_t>(), entry.at("name").get<std::string>(),
                      ranks_of(entry.at("ranks"), record.world_size)};
    if (!std::all_of(group.ranks.begin(), group.ranks.end(), is_rank))
      throw std::invalid_argument("a group with foreign ranks");
    record.groups.push_back(std::move(group));
  }
  for (const json& entry : document.at("calls")) record.calls.push_back(call_of(entry, record.groups));
  return record;
}

}  // namespace

const char* to_string(CallState state) noexcept {
  switch (state) {
    case CallState::kStarted:
      return "started";
    case CallState::kWaiting:
      return "waiting";
    case CallState::kFinished:
      return "finished";
    case CallState::kFailed:
      return "failed";
  }
  return "?";
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
  return document.dump(-1, ' ', false, json::error_handler_t::replace);  // names are cut at bytes
}

FlightRecord parse_flight_record(std::string_view text, const std::string& source) {
  try {
    return record_of(json::parse(text));
  } catch (const json::parse_error& error) {
    raise(ErrorKind::kFormat,
          "[comm.flight_record] {}: broken JSON at byte {} of {}. Was the rank killed while it wrote?", source,
          error.byte, text.size());
  } catch (const std::exception& error) {  // json's type errors, invalid_argument, stoull's
    raise(ErrorKind::kFormat,
          "[comm.flight_record] {}: {}. Wanted a file that Tessera wrote (docs/format/flight-record.md).", source,
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
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  char time[32] = "";
  std::strftime(time, sizeof time, "%Y%m%dT%H%M%S", &utc);
  return fmt::format("{}{}.{:03}Z-{:08x}", kRecords, time, milliseconds, std::random_device()());
}

fs::path last_records(const fs::path& folder) {
  std::error_code failed, ignored;
  fs::path last;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) {
    if (!entry->path().filename().string().starts_with(kRecords) || entry->path().filename() < last.filename())
      continue;
    const fs::directory_iterator files(entry->path(), ignored);
    if (std::any_of(files, fs::directory_iterator(), [](const auto& file) { return is_record(file.path()); }))
      last = entry->path();
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
  std::sort(paths.begin(), paths.end());
  std::vector<FlightRecord> records;
  for (const auto& path : paths) {
    FlightRecord record = parse_flight_record(read_file(path, kMaxFileBytes), path.string());
    TESSERA_CHECK(path.filename() == flight_record_name(record.rank), ErrorKind::kFormat,
                  "[comm.flight_record] {}: holds the record of rank {}. Was it renamed?", path.string(), record.rank);
    TESSERA_CHECK(records.empty() || records.front().world_size == record.world_size, ErrorKind::kFormat,
                  "[comm.flight_record] {}: of a run of {} ranks, the others of {}. Remove the files of the other run.",
                  path.string(), record.world_size, records.front().world_size);
    records.push_back(std::move(record));
  }
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return records;
}

}  // namespace tessera::comm
