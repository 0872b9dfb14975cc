// Which cores of this host each of its ranks gets, and how many threads. No communication. Internal to comm.
//
//   const CoreShares shares = share_cores(read_cores(), 4, PinMode::kAuto, process_environment());
//   shares.of_ranks[2].cores    // to bind rank 2 to; empty: to none
//
// Decided once, by the launcher, for all ranks of the host. docs/design/rendezvous.md says when ranks are bound.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::comm {

struct LogicalCore {
  int number = 0;
  int physical = 0;  // the lowest number among its hyperthreads, allowed ones or not
  int node = 0;      // memory node
};

struct HostCores {
  std::vector<LogicalCore> allowed;  // by affinity: taskset, cpuset, Slurm
  double quota = 0;                  // cores' worth of time that the cgroup allows; 0: no limit
  std::vector<int> gpu_nodes{};      // memory node of each GPU, by its place on the bus; -1: not known
};

// `root` stands for "/", for tests; `allowed` are the cores that this process may run on.
HostCores read_cores(const std::filesystem::path& root = "/");
HostCores read_cores(const std::filesystem::path& root, const std::vector<int>& allowed);

enum class PinMode { kAuto, kOn, kOff };
PinMode parse_pin_mode(std::string_view name);  // "auto", "on", "off"; Error kConfig

struct CoreShare {
  std::vector<int> cores;
  int node = -1;  // of all of them; -1: of several
};

struct CoreShares {
  std::vector<CoreShare> of_ranks;  // as many as ranks, or none
  int threads = 1;                  // a rank's OMP_NUM_THREADS, where the user has set none
  std::string why_not;              // ranks are not bound; "" when they are
};

// Where each local rank has a GPU of its number (CUDA_VISIBLE_DEVICES), it gets cores of that GPU's memory node; kAuto
// binds none where there is no such share for each. kOn: error kConfig when ranks cannot be bound.
CoreShares share_cores(const HostCores& cores, int ranks, PinMode mode, const Environment& environment);

}  // namespace tessera::comm
