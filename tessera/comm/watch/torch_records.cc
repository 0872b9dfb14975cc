#include "tessera/comm/watch/torch_records.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/torch/pickler.h"

namespace tessera::comm {
namespace {

constexpr const char* kTorchVersion = "2.10";
constexpr const char* kPrefix = "tessera_trace_rank_";

using Sizes = std::vector<int64_t>;

// The name of an operation in the form that PyTorch's analyzer (torchfrtrace) reads: a back-end's name, a colon and
// c10d's name of the operation. The analyzer requires the name of a back-end that it knows, such as gloo or nccl, and
// treats all of these in the same way.
std::string operation(const FlightCall& call, int position) {
  const Signature& signature = call.signature;
  switch (signature.op) {
    case Op::kAllGather:
      return "gloo:_all_gather_base";
    case Op::kReduceScatter:
      return "gloo:_reduce_scatter_base";
    case Op::kSend:
      return fmt::format("gloo:send {}->{}", position, signature.root);
    case Op::kRecv:
      return fmt::format("gloo:recv {}<-{}", position, signature.root);
    default:
      return fmt::format("gloo:{}", to_string(signature.op));
  }
}

Sizes shape_of(const Signature& signature) {
  if (signature.dims > Signature::kMaxSizes) return {signature.elements};
  return {signature.sizes, signature.sizes + signature.dims};
}

Sizes times(Sizes shape, int64_t ranks) {
  if (shape.empty()) return {ranks};
  shape[0] *= ranks;
  return shape;
}

PickleValue list_of(const Sizes& shape) {
  PickleValue::Items sizes(shape.begin(), shape.end());
  return PickleValue::list({PickleValue::list(std::move(sizes))});
}

PickleValue name_list(const char* name) { return PickleValue::list({*name ? PickleValue(name) : PickleValue("Byte")}); }

const char* state_of(CallState state) {
  return state == CallState::kFinished ? "completed" : state == CallState::kStarted ? "scheduled" : "started";
}

// Makes one entry of c10d's flight recorder. The signature has the sizes of the tensor whose sizes agree on all ranks:
// for an all-gather the input, for a reduce-scatter the output. The other tensor of these two collectives is `ranks`
// times as large.
PickleValue entry_of(const FlightCall& call, const FlightGroup& group, const std::string& name, int rank, int64_t id) {
  const Signature& signature = call.signature;
  const auto ranks = static_cast<int64_t>(group.ranks.size());
  const int position = static_cast<int>(std::ranges::find(group.ranks, rank) - group.ranks.begin());
  const Sizes own = shape_of(signature), all = times(own, ranks);
  const bool message = is_message(signature.op);
  const auto sequence = static_cast<int64_t>(signature.sequence);
  const auto nanoseconds = [](int64_t microseconds) {
    return microseconds ? PickleValue(microseconds * 1000) : PickleValue();
  };
  return PickleValue::dict(
      {{"record_id", id},
       {"pg_id", static_cast<int64_t>(signature.members)},
       {"process_group", PickleValue::tuple({name, escape(group.name)})},
       {"collective_seq_id", message ? int64_t{0} : sequence},
       {"p2p_seq_id", message ? sequence : int64_t{0}},
       {"op_id", id},
       {"profiling_name", operation(call, position)},
       {"time_created_ns", call.started_us * 1000},
       {"input_sizes", list_of(signature.op == Op::kReduceScatter ? all : own)},
       {"input_dtypes", name_list(dtype_name(signature.dtype))},
       {"output_sizes", list_of(signature.op == Op::kAllGather ? all : own)},
       {"output_dtypes", name_list(dtype_name(signature.dtype))},
       {"state", state_of(call.state)},
       {"time_discovered_started_ns", nanoseconds(call.waiting_us)},
       {"time_discovered_completed_ns", nanoseconds(call.finished_us)},
       {"retired", call.state == CallState::kFinished},
       {"timeout_ms", 0},
       {"is_p2p", message},
       {"frames", PickleValue::list({PickleValue::dict(
                      {{"name", escape(signature.subject)}, {"filename", "tessera"}, {"line", 0}})})}});
}

}  // namespace

// Groups are named by their id, because several groups may have one name. Calls of groups that the record does not list
// are left out.
std::string to_torch_pickle(const FlightRecord& record) {
  std::vector<PickleValue::Pair> configuration;
  std::map<uint32_t, std::pair<const FlightGroup*, std::string>> groups;
  for (const FlightGroup& group : record.groups) {
    const std::string name = fmt::format("{:08x}", group.id);
    if (!groups.emplace(group.id, std::pair(&group, name)).second) continue;
    configuration.emplace_back(name, PickleValue::dict({{"name", name},
                                                        {"desc", escape(group.name)},
                                                        {"ranks", fmt::format("[{}]", fmt::join(group.ranks, ", "))}}));
  }
  PickleValue::Items entries;
  auto id = static_cast<int64_t>(record.calls_made - std::min<uint64_t>(record.calls_made, record.calls.size()));
  for (const FlightCall& call : record.calls) {
    const auto found = groups.find(call.signature.members);
    if (found == groups.end()) continue;
    entries.push_back(entry_of(call, *found->second.first, found->second.second, record.rank, id++));
  }
  return pickle(PickleValue::dict({{"version", kTorchVersion},
                                   {"pg_config", PickleValue::dict(std::move(configuration))},
                                   {"pg_status", PickleValue::dict({})},
                                   {"comm_lib_version", "tessera"},
                                   {"entries", PickleValue::list(std::move(entries))}}),
                {.protocol = 4});
}

void write_torch_records(const std::vector<FlightRecord>& records, const std::filesystem::path& folder) {
  StagedFolder staged(folder);
  for (const FlightRecord& record : records) {
    publish_file(staged.path() / fmt::format("{}{}", kPrefix, record.rank), to_torch_pickle(record));
  }
  staged.publish();
}

}  // namespace tessera::comm
