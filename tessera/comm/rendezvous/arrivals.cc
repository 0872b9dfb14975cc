#include "tessera/comm/rendezvous/arrivals.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"

namespace tessera::comm {
namespace {

constexpr JsonLimits kArrivalLimits{.max_bytes = size_t{1} << 16, .max_depth = 1, .max_keys = 64};

// Parses a record. Text that another program left in the store throws Error kComm, which names the text.
template <class Take>
auto parsed(const std::string& text, const Take& take) {
  try {
    const Json said = parse_json_object(text, "it", kArrivalLimits);
    return take(JsonReader(said, "it"));
  } catch (const Error& error) {
    raise(ErrorKind::kComm, "[comm.rendezvous] found {} in the store, wanted the record of a rank of this version: {}",
          quote(text, 80), error.what());
  }
}

int count_at(const JsonReader& said, const char* key) {
  return static_cast<int>(said.integer(key, std::nullopt, 0, INT32_MAX));
}

// The ranks that share a host, and the cores that they may use together.
struct SharedHost {
  std::vector<int> ranks;
  std::string cores;
  int cores_per_rank() const { return count_cores(cores) / static_cast<int>(ranks.size()); }
};

// Returns the address of the first rank that is not on `host` and has an address; "" when there is none.
std::string address_elsewhere(const std::vector<Arrival>& arrivals, const std::string& host) {
  const auto found =
      std::ranges::find_if(arrivals, [&](const Arrival& one) { return one.host != host && !one.address.empty(); });
  return found == arrivals.end() ? "" : found->address;
}

}  // namespace

std::string Arrival::text() const {
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

Arrival Arrival::parse(const std::string& text) {
  return parsed(text, [](const JsonReader& said) {
    return Arrival{.rank = count_at(said, "rank"),
                   .size = count_at(said, "size"),
                   .local_rank = count_at(said, "local_rank"),
                   .local_size = count_at(said, "local_size"),
                   .pid = said.integer("pid", std::nullopt, 0, INT64_MAX),
                   .host_name = said.string("name"),
                   .host = said.string("host"),
                   .cores = said.string("cores"),
                   .address = said.string("address")};
  });
}

std::string Arrival::who() const { return fmt::format("rank {} (process {} on {})", rank, pid, host_name); }

std::string Place::text() const {
  return dump_json({{"local_rank", local_rank},
                    {"local_size", local_size},
                    {"cores_per_rank", cores_per_rank},
                    {"other_host", other_host}});
}

Place Place::parse(const std::string& text) {
  return parsed(text, [](const JsonReader& said) {
    return Place{.local_rank = count_at(said, "local_rank"),
                 .local_size = count_at(said, "local_size"),
                 .cores_per_rank = count_at(said, "cores_per_rank"),
                 .other_host = said.string("other_host")};
  });
}

std::string text_of_hosts(const Hosts& hosts) {
  return dump_json({{"count", hosts.count},
                    {"least_ranks", hosts.least_ranks},
                    {"most_ranks", hosts.most_ranks},
                    {"least_cores_per_rank", hosts.least_cores_per_rank},
                    {"loopback", hosts.loopback}});
}

Hosts hosts_of_text(const std::string& text) {
  return parsed(text, [](const JsonReader& said) {
    return Hosts{.count = count_at(said, "count"),
                 .least_ranks = count_at(said, "least_ranks"),
                 .most_ranks = count_at(said, "most_ranks"),
                 .least_cores_per_rank = count_at(said, "least_cores_per_rank"),
                 .loopback = said.boolean("loopback")};
  });
}

std::string sizes_differ(const Arrival& one, const Arrival& other) {
  return fmt::format(
      "[comm.rendezvous] {} says the world has {} ranks, {} says {}. Start all with the same numbers; when hosts have "
      "different numbers of ranks, pass the list of all hosts' numbers, such as --nproc 4,2, on each host.",
      other.who(), other.size, one.who(), one.size);
}

// Ranks are grouped by host identity. The cores of a host are the union of its ranks' affinity masks, so ranks that are
// bound to one core each do not look crowded. The number of hosts is the sum of 1 / local_size over all ranks, with the
// launcher's local_size where it is known: two simulated hosts on one machine count as two, and `loopback` is set.
Agreement agree(const std::vector<Arrival>& arrivals) {
  const int size = static_cast<int>(arrivals.size());
  std::map<std::string, SharedHost> shared;
  for (const Arrival& one : arrivals) {
    SharedHost& host = shared[one.host];
    host.ranks.push_back(one.rank);
    host.cores = union_of_core_masks(host.cores, one.cores);
  }
  // A rank that was started as if all ranks shared its host uses loopback, so no rank may be elsewhere.
  const auto alone = std::ranges::find_if(arrivals, [&](const Arrival& a) { return a.local_size == size; });
  if (alone != arrivals.end()) {
    for (const Arrival& one : arrivals) {
      TESSERA_CHECK(
          one.local_size == size && one.host == alone->host, ErrorKind::kConfig,
          "[comm.rendezvous] {} was started with all {} ranks on its host, but {} was started with {}. Start all with "
          "the same numbers.",
          alone->who(), size, one.who(),
          one.local_size == size ? "all of them on another host" : fmt::format("{} on its host", one.local_size));
    }
  }
  Agreement agreed{.hosts = {.count = 0,
                             .least_ranks = size,
                             .most_ranks = 0,
                             .least_cores_per_rank = 1 << 20,
                             .loopback = shared.size() == 1},
                   .places = {}};
  double count = 0;
  for (const Arrival& one : arrivals) {
    const SharedHost& host = shared.at(one.host);
    Place place{.local_rank = one.local_rank,
                .local_size = one.local_size,
                .cores_per_rank = host.cores_per_rank(),
                .other_host = ""};
    if (one.address.empty()) place.other_host = address_elsewhere(arrivals, one.host);
    if (place.local_size == 0) {
      place.local_size = static_cast<int>(host.ranks.size());
      place.local_rank = static_cast<int>(std::ranges::lower_bound(host.ranks, one.rank) - host.ranks.begin());
    }
    count += 1.0 / place.local_size;
    agreed.hosts.least_ranks = std::min(agreed.hosts.least_ranks, place.local_size);
    agreed.hosts.most_ranks = std::max(agreed.hosts.most_ranks, place.local_size);
    agreed.hosts.least_cores_per_rank = std::min(agreed.hosts.least_cores_per_rank, place.cores_per_rank);
    agreed.places.push_back(place);
  }
  agreed.hosts.count = std::max(1, static_cast<int>(count + 0.5));
  return agreed;
}

}  // namespace tessera::comm
