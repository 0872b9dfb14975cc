#include "tessera/comm/launch/core_shares.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/text/number.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxCores = 1 << 16;

std::string text_at(const fs::path& path) {
  try {
    return first_line(read_file(path, size_t{1} << 16));
  } catch (const Error&) {  // some kernels and containers do not have the file
    return "";
  }
}

// Parses a list of cores as /sys writes it, e.g. "0-3,8". Parts that cannot be parsed are left out.
std::vector<int> parse_core_list(std::string_view list) {
  std::vector<int> cores;
  while (!list.empty()) {
    const std::string_view run = list.substr(0, list.find(','));
    list.remove_prefix(std::min(run.size() + 1, list.size()));
    int first = -1, last = -1;
    const char* end = run.data() + run.size();
    auto [at, error] = std::from_chars(run.data(), end, first);
    if (error != std::errc() || first < 0) continue;
    last = first;
    if (at < end && *at == '-') std::from_chars(at + 1, end, last);
    for (int core = first; core <= std::min(last, kMaxCores); ++core) cores.push_back(core);
  }
  return cores;
}

// Decodes the affinity mask of this process: hexadecimal digits, the first one for cores 0 to 3.
std::vector<int> allowed_cores() {
  const std::string mask = core_mask();
  std::vector<int> cores;
  for (size_t i = 0; i < mask.size(); ++i) {
    const int digit = mask[i] <= '9' ? mask[i] - '0' : mask[i] - 'a' + 10;
    for (int bit = 0; bit < 4; ++bit) {
      if (digit >> bit & 1) cores.push_back(static_cast<int>(4 * i) + bit);
    }
  }
  return cores;
}

// Returns the smallest CPU limit of this process's cgroup and its parents, in cores; 0: no limit. Reads cgroups of
// version 2, and of version 1 at the path that containers see.
double cpu_quota(const fs::path& root) {
  double least = 0;
  const auto consider = [&](double quota, double period) {
    if (quota > 0 && period > 0 && (least == 0 || quota / period < least)) least = quota / period;
  };
  const fs::path cgroup = root / "sys/fs/cgroup";
  std::string own;
  const std::string cgroup_line = text_at(root / "proc/self/cgroup");  // "0::/path"
  if (cgroup_line.starts_with("0::/")) own = cgroup_line.substr(4);
  for (fs::path at = cgroup / own;; at = at.parent_path()) {
    double quota = 0, period = 0;
    if (std::sscanf(text_at(at / "cpu.max").c_str(), "%lf %lf", &quota, &period) == 2) consider(quota, period);
    if (at == cgroup || own.empty() || at == at.parent_path()) break;
  }
  for (const char* name : {"cpu", "cpu,cpuacct"}) {
    const std::string quota = text_at(cgroup / name / "cpu.cfs_quota_us"),
                      period = text_at(cgroup / name / "cpu.cfs_period_us");
    if (!quota.empty() && !period.empty()) consider(std::atof(quota.c_str()), std::atof(period.c_str()));
  }
  return least;
}

std::map<int, int> nodes_of_cores(const fs::path& root) {
  std::map<int, int> nodes;
  std::error_code failed;
  for (fs::directory_iterator entry(root / "sys/devices/system/node", failed), end; !failed && entry != end;
       entry.increment(failed)) {
    int node = -1;
    if (std::sscanf(entry->path().filename().c_str(), "node%d", &node) != 1) continue;
    for (const int core : parse_core_list(text_at(entry->path() / "cpulist"))) nodes[core] = node;
  }
  return nodes;
}

// Returns the NUMA node of each GPU. NVIDIA's driver lists GPUs by PCI bus address, and CUDA numbers GPUs of one model
// in the order of these addresses.
std::vector<int> nodes_of_gpus(const fs::path& root) {
  std::set<std::string> places;
  std::error_code failed;
  for (fs::directory_iterator entry(root / "proc/driver/nvidia/gpus", failed), end; !failed && entry != end;
       entry.increment(failed)) {
    places.insert(entry->path().filename().string());
  }
  std::vector<int> nodes;
  for (const auto& place : places) {
    const std::string node = text_at(root / "sys/bus/pci/devices" / place / "numa_node");
    nodes.push_back(node.empty() ? -1 : std::atoi(node.c_str()));
  }
  return nodes;
}

// Returns the NUMA node of each local rank's GPU; empty when the node of some rank's GPU is not known.
std::vector<int> gpu_nodes_of_ranks(const HostCores& host, int ranks, const Environment& environment) {
  std::vector<int> nodes;
  if (const auto visible = environment("CUDA_VISIBLE_DEVICES")) {
    for (std::string_view rest = *visible; !rest.empty();) {
      const std::string_view word = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(word.size() + 1, rest.size()));
      const auto gpu = parse_number<size_t>(word);
      if (!gpu || *gpu >= host.gpu_nodes.size()) return {};
      nodes.push_back(host.gpu_nodes[*gpu]);
    }
  } else {
    nodes = host.gpu_nodes;
  }
  if (nodes.size() < static_cast<size_t>(ranks)) return {};
  nodes.resize(static_cast<size_t>(ranks));
  return std::ranges::find(nodes, -1) == nodes.end() ? nodes : std::vector<int>();
}

// Reorders the shares so that each rank has one on its GPU's NUMA node. Returns false and changes nothing when there is
// no such order. The first fitting share may be taken for each rank, since shares of one node are interchangeable.
bool match_shares_to_gpus(std::vector<CoreShare>& shares, const std::vector<int>& gpu_nodes) {
  std::vector<CoreShare> left = shares, moved;
  for (const int node : gpu_nodes) {
    const auto found = std::ranges::find_if(left, [&](const CoreShare& one) { return one.node == node; });
    if (found == left.end()) return false;
    moved.push_back(std::move(*found));
    left.erase(found);
  }
  shares = std::move(moved);
  return true;
}

// Returns the environment setting by which the user has chosen threads or cores himself, as text for a message.
std::optional<std::string> user_affinity_setting(const Environment& environment, int cores_of_a_rank) {
  for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}) {
    if (environment(name)) return fmt::format("{} is set", name);
  }
  const auto threads = environment("OMP_NUM_THREADS");
  if (!threads || std::atoi(threads->c_str()) <= cores_of_a_rank) return std::nullopt;
  return fmt::format("OMP_NUM_THREADS={} is more than the {} cores of a rank", *threads, cores_of_a_rank);
}

}  // namespace

PinMode parse_pin_mode(std::string_view name) {
  if (name == "auto") return PinMode::kAuto;
  if (name == "on") return PinMode::kOn;
  if (name == "off") return PinMode::kOff;
  raise(ErrorKind::kConfig, "[launch] --pin '{}': wanted auto, on or off", name);
}

HostCores read_cores(const fs::path& root) { return read_cores(root, allowed_cores()); }

HostCores read_cores(const fs::path& root, const std::vector<int>& allowed) {
  const auto nodes = nodes_of_cores(root);
  HostCores host{.allowed = {}, .quota = cpu_quota(root), .gpu_nodes = nodes_of_gpus(root)};
  for (const int core : allowed) {
    const fs::path topology = root / fmt::format("sys/devices/system/cpu/cpu{}/topology", core);
    std::vector<int> siblings = parse_core_list(text_at(topology / "core_cpus_list"));
    if (siblings.empty()) siblings = parse_core_list(text_at(topology / "thread_siblings_list"));
    const auto node = nodes.find(core);
    host.allowed.push_back({.number = core,
                            .physical = siblings.empty() ? core : *std::ranges::min_element(siblings),
                            .node = node == nodes.end() ? 0 : node->second});
  }
  return host;
}

CoreShares share_cores(const HostCores& host, int ranks, PinMode mode, const Environment& environment) {
  // A physical core goes to one rank, with all its hyperthreads. The map sorts the physical cores by NUMA node, so
  // consecutive cores are on the same node where possible.
  std::map<std::pair<int, int>, std::vector<int>> by_place;
  std::set<int> nodes;
  for (const LogicalCore& core : host.allowed) {
    by_place[{core.node, core.physical}].push_back(core.number);
    nodes.insert(core.node);
  }
  const int whole = static_cast<int>(by_place.size());
  const double usable = host.quota > 0 ? std::min<double>(host.quota, whole) : whole;
  CoreShares result{.of_ranks = {}, .threads = std::max(1, static_cast<int>(usable / ranks)), .unbound_reason = ""};
  const int each = whole / std::max(ranks, 1);
  const auto find_unbound_reason = [&]() -> std::string {
    if (mode == PinMode::kOff) return "--pin off";
    if (each < 1) return fmt::format("{} ranks share {} cores", ranks, whole);
    if (host.quota > 0 && host.quota < whole) {
      return fmt::format("the cgroup allows {:.1f} of {} cores", host.quota, whole);
    }
    if (const auto setting = user_affinity_setting(environment, each)) return *setting;
    if (mode == PinMode::kOn) return "";
    if (ranks == 1) return "one rank has all cores";
    // With PinMode::kAuto a rank is not bound to a single core, because the rank's watchdog, connection and checkpoint
    // threads would then wait for the computing thread.
    if (each < 2) return "a rank would have one core";
    return "";
  };
  result.unbound_reason = find_unbound_reason();
  TESSERA_CHECK(mode != PinMode::kOn || result.unbound_reason.empty(), ErrorKind::kConfig,
                "[launch] --pin on: ranks cannot be bound to cores: {}", result.unbound_reason);
  if (!result.unbound_reason.empty()) return result;
  std::vector<std::pair<int, std::vector<int>>> places;  // NUMA node and hyperthreads of each physical core
  for (const auto& [place, threads] : by_place) places.emplace_back(place.first, threads);
  // Rank r gets the physical cores from r * whole / ranks up to, but not including, (r + 1) * whole / ranks; `whole` is
  // the number of physical cores. So the shares differ by one core at most.
  for (int rank = 0; rank < ranks; ++rank) {
    CoreShare share;
    for (int i = rank * whole / ranks; i < (rank + 1) * whole / ranks; ++i) {
      const auto& [node, threads] = places[static_cast<size_t>(i)];
      share.node = share.cores.empty() || share.node == node ? node : -1;
      share.cores.insert(share.cores.end(), threads.begin(), threads.end());
    }
    if (nodes.size() < 2) share.node = -1;
    result.of_ranks.push_back(std::move(share));
  }
  const auto gpu_nodes = gpu_nodes_of_ranks(host, ranks, environment);
  if (nodes.size() > 1 && !gpu_nodes.empty() && !match_shares_to_gpus(result.of_ranks, gpu_nodes) &&
      mode == PinMode::kAuto) {
    result.of_ranks.clear();
    result.unbound_reason = "the ranks' GPUs are at other memory nodes than equal shares of the cores";
  }
  return result;
}

}  // namespace tessera::comm
