// How ranks that were started by somebody find one another: who started them, and where they meet.
//
//   auto world = comm::World::connect({.timeout = std::chrono::minutes(2)});   // COLLECTIVE over all ranks
//
// In this order: our own launcher or flags (TESSERA_RENDEZVOUS, --nnodes/--node-rank/--master), torchrun
// (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), a Slurm step (SLURM_PROCID, SLURM_STEP_*), MPI (OMPI_COMM_WORLD_*,
// PMI_*), else a single rank. docs/design/rendezvous.md says why, and what TESSERA_RUN_ID and TESSERA_TOKEN do.
// Settings that are missing or contradict one another are Error kConfig and named. Everything here is thread-safe.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/rendezvous/world.h"

namespace c10d {
class Store;
}

namespace tessera::comm {

struct RendezvousFlags {
  int nproc = 0;            // ranks on this host; 0: not given
  int nnodes = 0;           // hosts; 0: not given
  int node_rank = -1;       // of this host; -1: not given
  std::string master = "";  // HOST:PORT of the first host
  std::string backend = "auto";
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of the meeting and of every collective
  std::string check = "timeout";                                // see WorldOptions
  std::string trace_folder = "";
};

// Reads one environment variable.
using Environment = std::function<std::optional<std::string>(const char* name)>;
Environment process_environment();
// What who joins a run must know: TESSERA_TOKEN, or what the file TESSERA_TOKEN_FILE holds; "": nothing. Error kConfig
// for an empty file, kIo for one that cannot be read.
std::string run_token(const Environment& environment);

// Where this rank meets the others. local_size 0: found out from the host names when they meet.
struct Meeting {
  WorldInfo info;
  std::string folder;  // of the file store; empty: over TCP
  std::string host;
  int port = 0;
  bool serve = false;          // this rank runs the TCP store
  bool foreign_store = false;  // it is torchrun's, c10d's TCPStore
  std::string prefix;          // of our keys in the store
  std::string run;             // the name of the run; ranks of another one are refused. Empty: not known
  std::string other_host;      // an address that leads to another host; meet() knows
  std::string token;           // who does not say it is not let in (hub_server.h); empty: none is asked
  std::string place() const;
};

// What the environment and the flags say, checked.
Meeting find_meeting(const RendezvousFlags& flags, const Environment& environment);
// "flags", "torchrun", "slurm", "mpi" or "single".
std::string who_started(const Environment& environment);

// COLLECTIVE over all ranks. The store of the meeting, once all ranks are there and agree on the size of the world and
// on who shares a host; fills in info.hosts and local_cores, and local_rank and local_size where they are not known.
// Error kComm names the ranks that did not arrive, kConfig two that contradict each other.
c10::intrusive_ptr<c10d::Store> meet(Meeting& meeting, std::chrono::milliseconds timeout);

// "node[01-03,7],gpu5" -> node01 node02 node03 node7 gpu5. Error kConfig for anything else, and beyond 65536.
std::vector<std::string> expand_node_list(std::string_view list);
// Slurm's tasks per node, "4(x2),3" -> 4 4 3. Error kConfig as above.
std::vector<int> expand_tasks_per_node(std::string_view list);

}  // namespace tessera::comm
