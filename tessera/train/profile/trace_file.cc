#include "tessera/train/profile/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/enum_name.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/version.h"

namespace tessera::train {
namespace {

// Thread ids of trace rows that do not belong to a thread of the process. They are larger than the ids of real threads.
constexpr int kCollectives = 1000, kWaits = 1001, kBackground = 1002;

std::string thread_name(int rank, int thread, const std::string& name) {
  return fmt::format(R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":{}}}}},
{{"ph":"M","name":"thread_sort_index","pid":{},"tid":{},"args":{{"sort_index":{}}}}})",
                     rank, thread, dump_json(name), rank, thread, thread);
}

const char* category(TraceKind kind) { return enum_name(kind, {"part", "module", "operation"}); }

}  // namespace

std::string trace_json(const TraceRecorder& recorder, const std::vector<TraceCollective>& collectives,
                       const TraceMetadata& metadata) {
  const int rank = metadata.rank;
  const nlohmann::ordered_json other = {{"tessera", version()},
                                        {"rank", rank},
                                        {"host", metadata.host},
                                        {"first_step", metadata.first_step},
                                        {"last_step", metadata.last_step},
                                        {"base_microseconds_since_epoch", metadata.base_us},
                                        {"dropped_events", recorder.dropped()},
                                        {"lost_collectives", metadata.lost_collectives}};
  std::string out = fmt::format("{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[\n", dump_json(other));
  out += fmt::format(R"({{"ph":"M","name":"process_name","pid":{},"args":{{"name":{}}}}},
{{"ph":"M","name":"process_sort_index","pid":{},"args":{{"sort_index":{}}}}},
)",
                     rank, dump_json(fmt::format("rank {} on {}", rank, metadata.host)), rank, rank);
  auto events = recorder.events();
  // Sorted by begin; of two spans with the same begin the longer one comes first, because it encloses the other.
  std::ranges::stable_sort(events, [](const auto& a, const auto& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.duration_ns > b.duration_ns;
  });
  uint32_t threads = 1;
  for (const auto& event : events) threads = std::max(threads, event.thread + 1);
  for (uint32_t thread = 0; thread < threads; ++thread) {
    const auto name = thread == 0 ? std::string("training") : fmt::format("backward {}", thread);
    out += thread_name(rank, static_cast<int>(thread), name) + ",\n";
  }
  out += thread_name(rank, kCollectives, "collectives under way") + ",\n";
  out += thread_name(rank, kWaits, "waiting for collectives") + ",\n";
  out += thread_name(rank, kBackground, "waiting in the background");
  // Operations have times of the steady clock; this offset converts them to microseconds since time 0 of the traces.
  const double offset = static_cast<double>(metadata.steady_offset_us - metadata.base_us);
  std::unordered_map<uint32_t, std::string> names;
  // Names are quoted as JSON once each: a trace has many events with few names.
  const auto name_of = [&](uint32_t id) -> const std::string& {
    auto& name = names[id];
    if (name.empty()) name = dump_json(recorder.name(id));
    return name;
  };
  for (const auto& event : events) {
    out +=
        fmt::format(",\n{{\"ph\":\"X\",\"cat\":\"{}\",\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f}",
                    category(event.kind), name_of(event.name), rank, event.thread,
                    static_cast<double>(event.begin_ns) * 1e-3 + offset, static_cast<double>(event.duration_ns) * 1e-3);
    if (event.module >= 0 && event.kind == TraceKind::kOperation) {
      out += ",\"args\":{\"module\":" + name_of(static_cast<uint32_t>(event.module)) + "}";
    }
    out += "}";
  }
  // A collective is an asynchronous event (b, e), because several may be in progress at the same time and would not
  // nest as spans of one thread. Waits of a thread do not overlap and are plain spans (X).
  int64_t id = 0;
  for (const auto& [call, bytes, on_training_thread] : collectives) {
    const auto& signature = call.signature;
    const auto name = dump_json(comm::to_string(signature.op));
    const nlohmann::ordered_json args = {{"group", signature.group},
                                         {"bytes", bytes},
                                         {"call", comm::to_string(signature)},
                                         {"sequence", signature.sequence}};
    const auto common = fmt::format("\"cat\":\"collective\",\"id\":\"{}.{}\",\"name\":{},\"pid\":{},\"tid\":{}", rank,
                                    ++id, name, rank, kCollectives);
    const int64_t end = std::max(call.finished_us, call.started_us);
    out += fmt::format(",\n{{\"ph\":\"b\",{},\"ts\":{},\"args\":{}}}", common, call.started_us - metadata.base_us,
                       dump_json(args));
    out += fmt::format(",\n{{\"ph\":\"e\",{},\"ts\":{}}}", common, end - metadata.base_us);
    if (call.waiting_us == 0 || call.finished_us <= call.waiting_us) continue;
    out += fmt::format(
        ",\n{{\"ph\":\"X\",\"cat\":\"wait\",\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},\"args\":{}}}", name,
        rank, on_training_thread ? kWaits : kBackground, call.waiting_us - metadata.base_us,
        call.finished_us - call.waiting_us, dump_json(args));
  }
  return out + "\n]}\n";
}

}  // namespace tessera::train
