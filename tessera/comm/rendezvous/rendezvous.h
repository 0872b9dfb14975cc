// Rendezvous: finds out which launcher started this process, and the store at which its ranks meet.
//
//   auto world = comm::World::connect({.timeout = std::chrono::minutes(2)});   // COLLECTIVE over all ranks
//
// The sources, in this order: Tessera's launcher (TESSERA_RENDEZVOUS), torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT), a Slurm step (SLURM_PROCID, SLURM_STEP_*), MPI (OMPI_COMM_WORLD_*, PMI_*), flags
// (--nnodes/--node-rank/--master), otherwise a single rank. docs/design/rendezvous.md gives the reasons, and describes
// TESSERA_RUN_ID and TESSERA_TOKEN. Missing or contradictory settings throw Error kConfig, which names them. Everything
// here is thread-safe.
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
  int node_rank = -1;       // number of this host; -1: not given
  std::string master = "";  // HOST:PORT of the first host
  std::string backend = "auto";
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of the rendezvous and of every collective
  std::string check = "timeout";                                // see WorldOptions
  std::string trace_folder = "";
};

// Reads one environment variable.
using Environment = std::function<std::optional<std::string>(const char* name)>;
Environment process_environment();
// Returns the secret that a process must know to join the run: TESSERA_TOKEN, or the content of the file
// TESSERA_TOKEN_FILE; "" when neither is set. Error kConfig for an empty file, kIo for a file that cannot be read.
std::string run_token(const Environment& environment);

// The store at which this rank meets the others. info.local_size 0: meet() finds it from the hosts' identities.
struct RendezvousPoint {
  WorldInfo info;
  std::string folder;  // folder of the file store; empty: the store is at host:port
  std::string host;
  int port = 0;
  bool serve = false;              // this rank's process runs the TCP store
  bool is_torchrun_store = false;  // the store is torchrun's, a c10d TCPStore
  std::string prefix;              // prefix of Tessera's keys in the store
  std::string run;                 // name of the run; ranks of another run are refused. Empty: not known
  std::string other_host;          // address of another host; set by meet()
  std::string token;          // secret that ranks must send to the store (run_store_server.h); empty: none is needed
  std::string place() const;  // the folder, or "HOST:PORT", for messages
};

// Reads the rendezvous from the environment and the flags, and checks it. Error kConfig.
RendezvousPoint find_rendezvous(const RendezvousFlags& flags, const Environment& environment);
// The launcher that started this process: "flags" (Tessera's launcher), "torchrun", "slurm", "mpi" or "single".
std::string launcher_name(const Environment& environment);

// COLLECTIVE over all ranks. Returns the store once all ranks have arrived and agree on the world size and on the ranks
// that share a host. Fills in info.hosts, info.cores_per_rank and other_host, and info.local_rank and info.local_size
// where they are not known. Error kComm names the ranks that did not arrive; kConfig names two ranks that contradict
// each other.
c10::intrusive_ptr<c10d::Store> meet(RendezvousPoint& point, std::chrono::milliseconds timeout);

// Expands Slurm's node list: "node[01-03,7],gpu5" -> node01 node02 node03 node7 gpu5. Error kConfig for malformed lists
// and for more than 65536 nodes.
std::vector<std::string> expand_node_list(std::string_view list);
// Expands Slurm's tasks per node: "4(x2),3" -> 4 4 3. Error kConfig for malformed lists and for more than 65536 nodes.
std::vector<int> expand_tasks_per_node(std::string_view list);

}  // namespace tessera::comm
