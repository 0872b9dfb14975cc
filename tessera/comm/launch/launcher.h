// Starting and supervising the ranks of this host, for any program.
//
//   return comm::launch_local_ranks({"./my_training", "--epochs", "3"}, {.nproc = 4});
//
// Each rank is a process with its own process group, torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and TESSERA_RENDEZVOUS. When one ends badly the others are
// ended within `grace` + 1 s, its message is printed once on stderr, and its exit code is returned. SIGINT,
// SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on. Neither ranks nor what they started, nor a file, stay
// behind, even when the launcher is killed. With `max_restarts` all ranks are then started again, until two alike
// failures or as many restarts without progress (restart_policy.h). SIGUSR1, of which batch systems give notice of the
// end, finds no rank to hear it between two attempts: then there is no other. A SIGHUP that is ignored (nohup) stays
// so. Call from a process with one thread.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/launch/core_shares.h"
#include "tessera/comm/launch/rank_output.h"

namespace tessera::comm {

struct LauncherOptions {
  int nproc = 1;                         // ranks on this host
  std::vector<int> nproc_of_hosts = {};  // on each host, when they have unlike numbers; nproc then counts for nothing
  int nnodes = 1;
  int node_rank = 0;
  std::string master = "";  // HOST:PORT of node 0; needed for several nodes
  // Tells this run from others on several nodes; the same on all of them. Empty: TESSERA_RUN_ID, else what is run.
  std::string run_id = "";
  std::string token_file = "";  // whose content ranks must know; empty: TESSERA_TOKEN or TESSERA_TOKEN_FILE, if set
  std::chrono::milliseconds grace = std::chrono::seconds(3);  // from SIGTERM to SIGKILL once a rank has failed
  std::chrono::milliseconds stop_grace =
      std::chrono::seconds(30);  // the same once a rank has ended after a passed-on signal
  int max_restarts = 0;          // without progress in between; the same on all hosts, which start again together
  // What was saved last, as a word that changes with every save, asked between attempts, nothing where that cannot be
  // read just now; null: progress is a step that was not reached before (rank_notes.h).
  std::function<std::optional<std::string>()> saved_mark = nullptr;
  bool tells_steps = false;  // the program tells every step: where it has told none it has not done any
  bool usr1_stops = false;   // SIGUSR1 asks the program to end: what fails after it is not started again
  OutputOptions output{};
  PinMode pin = PinMode::kAuto;
};

// Returns 0 when all ranks end with 0; else the exit code of the first to end badly in the last attempt, 128 + n after
// signal n.
// Error kConfig for options that cannot be, or when `arguments[0]` is no program.
int launch_local_ranks(const std::vector<std::string>& arguments, const LauncherOptions& options);

}  // namespace tessera::comm
