#include "tessera/comm/rendezvous/rank_records.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"

namespace tessera::comm {
namespace {

constexpr JsonLimits kRankRecordLimits{.max_bytes = size_t{1} << 16, .max_depth = 1, .max_keys = 64};

// Parses a record. Text that another program left in the store throws Error kComm, which names the text.
template <class Take>
auto parsed(const std::string& text, const Take& take) {
  try {
    const Json fields = parse_json_object(text, "it", kRankRecordLimits);
    return take(JsonReader(fields, "it"));
  } catch (const Error& error) {
    raise(ErrorKind::kComm, "[comm.rendezvous] found {} in the store, wanted the record of a rank of this version: {}",
          quote(text, 80), error.what());
  }
}

int count_at(const JsonReader& fields, const char* key) {
  return static_cast<int>(fields.integer(key, std::nullopt, 0, INT32_MAX));
}

// The ranks that share a host, and the cores that they may use together.
struct SharedHost {
  std::vector<int> ranks;
  std::string cores;
  int cores_per_rank() const { return count_cores(cores) / static_cast<int>(ranks.size()); }
};

// Returns the address of the first rank that is not on `host` and has an address; "" when there is none.
std::string address_elsewhere(const std::vector<RankRecord>& records, const std::string& host) {
  const auto found =
      std::ranges::find_if(records, [&](const RankRecord& one) { return one.host != host && !one.address.empty(); });
  return found == records.end() ? "" : found->address;
}

}  // namespace

std::string RankRecord::text() const {
  return dump_json({{"rank", rank},
                    {"size", size},
                    {"local_rank", local_rank},
                    {"local_size", local_size},
                    {"pid", pid},
                    {"name", host_name},
                    {"host", host},
                    {"cores", cores},
                    {"address", address}});
}

RankRecord RankRecord::parse(const std::string& text) {
  return parsed(text, [](const JsonReader& fields) {
    return RankRecord{.rank = count_at(fields, "rank"),
                      .size = count_at(fields, "size"),
                      .local_rank = count_at(fields, "local_rank"),
                      .local_size = count_at(fields, "local_size"),
                      .pid = fields.integer("pid", std::nullopt, 0, INT64_MAX),
                      .host_name = fields.string("name"),
                      .host = fields.string("host"),
                      .cores = fields.string("cores"),
                      .address = fields.string("address")};
  });
}

std::string RankRecord::who() const { return fmt::format("rank {} (process {} on {})", rank, pid, host_name); }

std::string RankPosition::text() const {
  return dump_json({{"local_rank", local_rank},
                    {"local_size", local_size},
                    {"cores_per_rank", cores_per_rank},
                    {"other_host", other_host}});
}

RankPosition RankPosition::parse(const std::string& text) {
  return parsed(text, [](const JsonReader& fields) {
    return RankPosition{.local_rank = count_at(fields, "local_rank"),
                        .local_size = count_at(fields, "local_size"),
                        .cores_per_rank = count_at(fields, "cores_per_rank"),
                        .other_host = fields.string("other_host")};
  });
}

std::string text_of_hosts(const HostSummary& hosts) {
  return dump_json({{"count", hosts.count},
                    {"least_ranks", hosts.least_ranks},
                    {"most_ranks", hosts.most_ranks},
                    {"least_cores_per_rank", hosts.least_cores_per_rank},
                    {"loopback", hosts.loopback}});
}

HostSummary hosts_of_text(const std::string& text) {
  return parsed(text, [](const JsonReader& fields) {
    return HostSummary{.count = count_at(fields, "count"),
                       .least_ranks = count_at(fields, "least_ranks"),
                       .most_ranks = count_at(fields, "most_ranks"),
                       .least_cores_per_rank = count_at(fields, "least_cores_per_rank"),
                       .loopback = fields.boolean("loopback")};
  });
}

std::string sizes_differ(const RankRecord& one, const RankRecord& other) {
  return fmt::format(
      "[comm.rendezvous] {} says the world has {} ranks, {} says {}. Start all with the same numbers; when hosts have "
      "different numbers of ranks, pass the list of all hosts' numbers, such as --nproc 4,2, on each host.",
      other.who(), other.size, one.who(), one.size);
}

// Ranks are grouped by host identity. The cores of a host are the union of its ranks' affinity masks, so ranks that are
// bound to one core each do not look oversubscribed. The number of hosts is the sum of 1 / local_size over all ranks.
// Where a launcher has given a local_size, it is used rather than the number of ranks with the same host identity: two
// simulated hosts on one machine count as two hosts, and `loopback` is set.
RendezvousResult agree(const std::vector<RankRecord>& records) {
  const int size = static_cast<int>(records.size());
  std::map<std::string, SharedHost> shared;
  for (const RankRecord& one : records) {
    SharedHost& host = shared[one.host];
    host.ranks.push_back(one.rank);
    host.cores = union_of_core_masks(host.cores, one.cores);
  }
  // If the local_size of a rank is the number of all ranks, this rank takes all ranks to be on its host and uses
  // loopback. So all ranks must be on its host and must have been started with the same local_size.
  const auto alone = std::ranges::find_if(records, [&](const RankRecord& a) { return a.local_size == size; });
  if (alone != records.end()) {
    for (const RankRecord& one : records) {
      TESSERA_CHECK(
          one.local_size == size && one.host == alone->host, ErrorKind::kConfig,
          "[comm.rendezvous] {} was started with all {} ranks on its host, but {} was started with {}. Start all with "
          "the same numbers.",
          alone->who(), size, one.who(),
          one.local_size == size ? "all of them on another host" : fmt::format("{} on its host", one.local_size));
    }
  }
  RendezvousResult agreed{.hosts = {.count = 0,
                                    .least_ranks = size,
                                    .most_ranks = 0,
                                    .least_cores_per_rank = 1 << 20,
                                    .loopback = shared.size() == 1},
                          .positions = {}};
  double count = 0;
  for (const RankRecord& one : records) {
    const SharedHost& host = shared.at(one.host);
    RankPosition position{.local_rank = one.local_rank,
                          .local_size = one.local_size,
                          .cores_per_rank = host.cores_per_rank(),
                          .other_host = ""};
    if (one.address.empty()) position.other_host = address_elsewhere(records, one.host);
    if (position.local_size == 0) {
      position.local_size = static_cast<int>(host.ranks.size());
      position.local_rank = static_cast<int>(std::ranges::lower_bound(host.ranks, one.rank) - host.ranks.begin());
    }
    count += 1.0 / position.local_size;
    agreed.hosts.least_ranks = std::min(agreed.hosts.least_ranks, position.local_size);
    agreed.hosts.most_ranks = std::max(agreed.hosts.most_ranks, position.local_size);
    agreed.hosts.least_cores_per_rank = std::min(agreed.hosts.least_cores_per_rank, position.cores_per_rank);
    agreed.positions.push_back(position);
  }
  agreed.hosts.count = std::max(1, static_cast<int>(count + 0.5));
  return agreed;
}

}  // namespace tessera::comm
