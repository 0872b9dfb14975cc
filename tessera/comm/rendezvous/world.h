// The ranks that work together, seen from one of them: rank, size, store and groups. Passed explicitly;
// there is no global process group, so several ranks can live in one process as threads.
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

// The hosts of a world. All ranks know the same of them, so what is decided from this is decided alike everywhere;
// its own local_size and cores_per_rank may be those of its host alone.
struct Hosts {
  int count = 0;                        // 0: nobody has told; World::create() then takes this rank's own host for all
  int least_ranks = 1, most_ranks = 1;  // that one of them has
  int least_cores_per_rank = 1;         // where cores are scarcest; 0: fewer than ranks
  bool loopback = true;                 // they are one machine after all
};

struct WorldInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host
  int local_size = 1;
  std::string source = "single";  // who started the ranks: flags, torchrun, slurm, mpi, single, threads
  int cores_per_rank = 1;         // of this host; 0: its ranks may use fewer cores than they are
  Hosts hosts = {};
};

struct RendezvousFlags;  // rendezvous.h
class FakeAccount;
class Monitor;
struct ThreadRoom;

struct WorldOptions {
  std::string backend = "auto";                                 // auto, gloo, nccl
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of every collective
  std::string check = "timeout";  // when ranks compare what they called: off, timeout, always
  std::string trace_folder = "";  // of flight records; TESSERA_TRACE_DIR comes first; both empty: none are written
  // Of rank 0's host, where its watchdog listens; empty: 127.0.0.1 on one host, else there is none.
  std::string watch_address = "";
  // Of a host that is not this one, by which it finds the interface that leads to others; empty: not known.
  std::string other_host = "";
  // A rank that is in no collective to hear that the world broke is ended with exit code 4, 3 s later.
  bool ends_process = false;
  std::shared_ptr<ThreadRoom> threads = nullptr;  // the ranks are threads of this process
};

class World {
 public:
  // Finds out who started this process (see rendezvous.h for the order), meets the other ranks, and
  // returns once all are there. COLLECTIVE over all ranks. Error kComm after the timeout, kConfig for
  // settings that contradict one another.
  static std::shared_ptr<World> connect(const RendezvousFlags& flags);
  // A world of this rank over a given store; how thread ranks and connect() make theirs. COLLECTIVE over all ranks,
  // unless they are threads.
  static std::shared_ptr<World> create(WorldInfo info, c10::intrusive_ptr<c10d::Store> store,
                                       WorldOptions options = {});
  // Rank `rank` of a world of `size` ranks that exists only here, with `local_size` ranks a host: collectives end at
  // once and are counted in `account` (fake_backend.h).
  static std::shared_ptr<World> create_fake(int rank, int size, std::shared_ptr<FakeAccount> account,
                                            int local_size = 8);
  // One rank, no communication.
  static std::shared_ptr<World> single();
  ~World();

  int rank() const { return info_.rank; }
  int size() const { return info_.size; }
  const WorldInfo& info() const { return info_; }
  int device_index() const;  // of this rank's GPU, among those that its process sees
  c10d::Store& store() const;
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  Monitor& monitor() const;  // flight recorder and watchdog of this rank

  // The group of all ranks, made at first use. COLLECTIVE over all ranks at that first use, for each kind of device.
  std::shared_ptr<Group> group(c10::DeviceType device = c10::DeviceType::CPU);
  // A group of `ranks` (global, this rank among them). COLLECTIVE over those ranks only; the others need
  // not call. `name` must be the same on all of them; groups of equal name are told apart by their ranks
  // and by how many came before.
  // A group for CUDA carries CPU tensors too. Error kConfig when it needs NCCL and there is none.
  std::shared_ptr<Group> new_group(const std::vector<int>& ranks, const std::string& name,
                                   c10::DeviceType device = c10::DeviceType::CPU);
  // The same where every rank of the world makes a group now, `part` being the number of this one: ranks of one group
  // give the same, others another one. An accelerator's communicator is split from the world's. COLLECTIVE over the
  // world.
  std::shared_ptr<Group> new_group_of_parts(const std::vector<int>& ranks, const std::string& name,
                                            c10::DeviceType device, int part);
  // Groups with connections to other ranks that are alive here.
  int open_groups() const;
  // Breaks off every group of this rank, here and on the peers; see Group::abort. From any thread.
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
