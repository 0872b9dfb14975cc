// Divides the cores of this host among its ranks, and chooses the number of threads per rank. No communication.
// Internal to comm.
//
//   const CoreShares shares = share_cores(read_cores(), 4, PinMode::kAuto, process_environment());
//   shares.of_ranks[2].cores    // cores to bind local rank 2 to
//
// The launcher decides once for all ranks of the host. docs/design/rendezvous.md says when ranks are bound to cores.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::comm {

struct LogicalCore {
  int number = 0;
  int physical = 0;  // lowest number among the hyperthreads of its physical core, allowed to this process or not
  int node = 0;      // NUMA node
};

struct HostCores {
  std::vector<LogicalCore> allowed;  // cores in the affinity mask of this process (taskset, cpuset, Slurm)
  double quota = 0;                  // CPU time that the cgroup allows, in cores; 0: no limit
  std::vector<int> gpu_nodes{};      // NUMA node of each GPU, in PCI bus order; -1: not known
};

// Reads the cores from /proc and /sys. `root` replaces "/" in tests; `allowed` are the cores that this process may run
// on.
HostCores read_cores(const std::filesystem::path& root = "/");
HostCores read_cores(const std::filesystem::path& root, const std::vector<int>& allowed);

enum class PinMode { kAuto, kOn, kOff };
PinMode parse_pin_mode(std::string_view name);  // "auto", "on", "off"; Error kConfig

struct CoreShare {
  std::vector<int> cores;
  int node = -1;  // NUMA node of all these cores; -1: they are on several nodes, or the host has one node
};

struct CoreShares {
  std::vector<CoreShare> of_ranks;  // one per local rank; empty: ranks are not bound to cores
  int threads = 1;                  // OMP_NUM_THREADS of a rank, where the user has set none
  std::string unbound_reason;       // why ranks are not bound; "" when they are
};

// Divides the cores into equal shares. Where local rank i uses GPU i (of CUDA_VISIBLE_DEVICES), rank i gets a share on
// that GPU's NUMA node; if there is no such share for every rank, kAuto binds no rank. Throws Error kConfig for kOn
// when ranks cannot be bound.
CoreShares share_cores(const HostCores& cores, int ranks, PinMode mode, const Environment& environment);

}  // namespace tessera::comm
