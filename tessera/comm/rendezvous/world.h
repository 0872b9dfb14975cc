// All ranks of a run, from the view of one rank: its rank, the world size, the store and the groups. A World is passed
// explicitly. There is no global process group, so several ranks can run as threads of one process.
//
//   auto world = comm::World::connect(comm::RendezvousFlags{});     // COLLECTIVE over all ranks
//   auto everyone = world->group();
//
// A World belongs to one rank; its groups must not outlive it. Not thread-safe.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm {

// The hosts of a world. The values are equal on all ranks, so decisions that must be the same on all ranks are based on
// them. WorldInfo::local_size and cores_per_rank, in contrast, may differ between hosts.
struct HostSummary {
  int count = 0;                        // 0: not known; World::create() then assumes that all hosts are like this one
  int least_ranks = 1, most_ranks = 1;  // smallest and largest number of ranks on a host
  int least_cores_per_rank = 1;         // smallest number of cores per rank on a host; 0: fewer cores than ranks
  bool loopback = true;                 // all ranks are on one machine
};

struct WorldInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host
  int local_size = 1;
  std::string source = "single";  // what started the ranks: flags, torchrun, slurm, mpi, single, threads, fake
  int cores_per_rank = 1;         // on this host; 0: fewer cores than ranks
  HostSummary hosts = {};
};

struct RendezvousFlags;  // rendezvous.h
class FakeCostAccount;
class Monitor;
struct ThreadRankState;

struct WorldOptions {
  std::string backend = "auto";                                 // auto, shm, gloo, nccl
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of every collective
  std::string check = "timeout";  // when ranks compare their calls (CheckMode in monitor.h): off, timeout, always
  std::string trace_folder = "";  // folder of flight records; TESSERA_TRACE_DIR overrides it; both empty: none
  // Address of rank 0's host at which its watchdog listens. Empty: 127.0.0.1 on one host; no watchdog on several hosts.
  std::string watch_address = "";
  // Address of another host, used to choose the network interface towards other hosts. Empty: not known.
  std::string other_host = "";
  // When another rank has failed and this rank starts no collective within 3 s that could throw the error, the process
  // ends with exit code 4.
  bool ends_process = false;
  std::shared_ptr<ThreadRankState> threads = nullptr;  // the ranks are threads of this process
};

class World {
 public:
  // Finds out which launcher started this process (rendezvous.h lists the launchers in the order in which they are
  // looked for), meets the other ranks, and returns once all ranks have arrived. COLLECTIVE over all ranks. Error kComm
  // after the timeout, kConfig for contradictory settings.
  static std::shared_ptr<World> connect(const RendezvousFlags& flags);
  // Makes a world of this rank over a given store; used by connect() and for thread ranks. COLLECTIVE over all ranks,
  // unless the ranks are threads.
  static std::shared_ptr<World> create(WorldInfo info, c10::intrusive_ptr<c10d::Store> store,
                                       WorldOptions options = {});
  // Rank `rank` of a pretended world of `size` ranks, with `local_size` ranks per host. No other rank exists:
  // collectives end at once and are counted in `account` (fake_backend.h).
  static std::shared_ptr<World> create_fake(int rank, int size, std::shared_ptr<FakeCostAccount> account,
                                            int local_size = 8);
  // Makes a world of one rank, without communication.
  static std::shared_ptr<World> single();
  ~World();

  int rank() const { return info_.rank; }
  int size() const { return info_.size; }
  const WorldInfo& info() const { return info_; }
  int device_index() const;  // index of this rank's GPU among the GPUs visible to its process
  c10d::Store& store() const;
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  Monitor& monitor() const;  // flight recorder and watchdog of this rank

  // The group of all ranks. It is made at the first call for each type of device; that call is COLLECTIVE over all
  // ranks.
  std::shared_ptr<Group> group(c10::DeviceType device = c10::DeviceType::CPU);
  // Makes a group of `ranks` (global ranks, this rank among them). COLLECTIVE over `ranks` only, unlike PyTorch's
  // new_group. `name` must be equal on these ranks. Groups of equal name are distinguished by their ranks and by the
  // number of earlier groups with the same name and ranks. A group for CUDA accepts CPU tensors too. Error kConfig when
  // the group needs NCCL and this build has none; kShape for wrong ranks.
  std::shared_ptr<Group> new_group(const std::vector<int>& ranks, const std::string& name,
                                   c10::DeviceType device = c10::DeviceType::CPU);
  // Makes one group on every rank of the world at once, for example all groups of a mesh dimension. Ranks of one group
  // pass the same `part`, ranks of different groups different parts. An accelerator's communicator is split from the
  // communicator of the world (ncclCommSplit, `part` is the color). COLLECTIVE over the world.
  std::shared_ptr<Group> new_group_by_split(const std::vector<int>& ranks, const std::string& name,
                                            c10::DeviceType device, int part);
  // Number of living back-ends of this world's groups.
  int open_groups() const;
  // Aborts every group of this rank, as Group::abort() does. May be called from any thread.
  void abort() noexcept;

 private:
  World(WorldInfo info, c10::intrusive_ptr<c10d::Store> store, WorldOptions options);
  void start_watch();
  std::vector<int> all_ranks() const;
  c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks, int position) const;
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks, const std::string& name, c10::DeviceType device,
                                    std::optional<int> part);
  void leave_store(bool failed) noexcept;
  struct Impl;
  WorldInfo info_;
  WorldOptions options_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
