// Starting and supervising the ranks of this host, for any program.
//
//   return comm::launch_local_ranks({"./my_training", "--epochs", "3"}, {.nproc = 4});
//
// Each rank is a process with its own process group, torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and TESSERA_RENDEZVOUS. When one ends badly the others are
// ended within `grace` + 1 s, its message is printed once on stderr, and its exit code is returned. SIGINT,
// SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on. Neither ranks nor what they started, nor a file, stay
// behind, even when the launcher is killed. Call from a process with one thread.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace tessera::comm {

struct LauncherOptions {
  int nproc = 1;                         // ranks on this host
  std::vector<int> nproc_of_hosts = {};  // on each host, when they have unlike numbers; nproc then counts for nothing
  int nnodes = 1;
  int node_rank = 0;
  std::string master = "";  // HOST:PORT of node 0; needed for several nodes
  // Tells this run from others on several nodes; the same on all of them. Empty: TESSERA_RUN_ID, else what is run.
  std::string run_id = "";
  std::chrono::milliseconds grace = std::chrono::seconds(3);  // from SIGTERM to SIGKILL once a rank has failed
  std::chrono::milliseconds stop_grace =
      std::chrono::seconds(30);  // the same once a rank has ended after a passed-on signal
};

// Returns 0 when all ranks end with 0; else the exit code of the first to end badly, 128 + n after signal n.
// Error kConfig for options that cannot be, or when `arguments[0]` is no program.
int launch_local_ranks(const std::vector<std::string>& arguments, const LauncherOptions& options);

}  // namespace tessera::comm
