#include "tessera/parallel/detail/prefetch_choice.h"

#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera::parallel {
namespace {

// One line: rank, ranks on its host, wish, host, cores.
std::string to_line(const RankPlace& place) {
  const char* wish = !place.wish ? "default" : *place.wish ? "on" : "off";
  return fmt::format("{} {} {} {} {}\n", place.rank, place.ranks_on_host, wish, place.host,
                     fmt::join(place.cores, " "));
}

RankPlace from_line(const std::string& line) {
  std::istringstream words(line);
  RankPlace place;
  std::string wish;
  words >> place.rank >> place.ranks_on_host >> wish >> place.host;
  if (wish != "default") place.wish = wish == "on";
  for (int core = 0; words >> core;) place.cores.push_back(core);
  return place;
}

std::vector<int> allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

std::string host_name() {
  char name[256] = {};
  const bool known = ::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0';
  return known ? name : "unknown";
}

void check_wishes(const std::vector<RankPlace>& ranks) {
  const auto word = [](const RankPlace& place) { return !place.wish ? "not called" : *place.wish ? "on" : "off"; };
  for (const auto& place : ranks) {
    TESSERA_CHECK(
        place.wish == ranks[0].wish, ErrorKind::kShape,
        "[fsdp.forward] set_prefetch: {} on rank {}, {} on rank {}. Prefetch changes the order of collectives: "
        "call it alike on all ranks.",
        word(ranks[0]), ranks[0].rank, word(place), place.rank);
  }
}

}  // namespace

bool has_core_for_each(const std::vector<RankPlace>& ranks) {
  struct Host {
    std::set<int> cores;
    int here = 0, all = 0;
    bool bound = false;  // to cores of their own
  };
  std::map<std::string, Host> hosts;
  for (const auto& place : ranks) {
    auto& host = hosts[place.host];
    const size_t before = host.cores.size();
    host.cores.insert(place.cores.begin(), place.cores.end());
    host.bound = host.bound || (host.here > 0 && host.cores.size() > before);
    ++host.here;
    host.all = std::max(host.all, place.ranks_on_host);
  }
  return std::all_of(hosts.begin(), hosts.end(), [](const auto& each) {
    const Host& host = each.second;
    return static_cast<int>(host.cores.size()) >= (host.bound ? host.here : std::max(host.here, host.all));
  });
}

bool agree_on_prefetch(const comm::World& world, const std::vector<MeshPtr>& meshes, std::optional<bool> wish) {
  std::set<std::string> lines = {to_line({.rank = world.rank(),
                                          .host = host_name(),
                                          .ranks_on_host = world.info().local_size,
                                          .cores = allowed_cores(),
                                          .wish = wish})};
  for (const auto& mesh : meshes) {
    for (int64_t dim = mesh->ndim(); dim-- > 0;) {
      if (mesh->size(dim) == 1) continue;
      for (const auto& theirs : comm::all_gather_bytes(*mesh->group(dim), fmt::format("{}", fmt::join(lines, "")))) {
        std::istringstream text(theirs);
        for (std::string line; std::getline(text, line);) lines.insert(line + "\n");
      }
    }
  }
  std::vector<RankPlace> ranks;
  for (const auto& line : lines) ranks.push_back(from_line(line));
  std::sort(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  check_wishes(ranks);
  return wish.value_or(has_core_for_each(ranks));
}

}  // namespace tessera::parallel
