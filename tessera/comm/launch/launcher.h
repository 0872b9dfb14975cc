// The launcher: starts and supervises the ranks of this host, for any program (like torchrun).
//
//   return comm::launch_local_ranks({"./my_training", "--epochs", "3"}, {.nproc = 4});
//
// Each rank is a process with its own process group, torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK,
// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and TESSERA_RENDEZVOUS. When a rank fails, the launcher ends the
// other ranks within `grace` + 1 s, prints the message of the failed rank once on stderr, and returns its exit code.
// The launcher leaves no rank, no process that a rank started, and no file behind, even when the launcher itself is
// killed.
//
// Signals: SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the ranks. Batch systems send SIGUSR1 before
// they end a job; when it arrives between two attempts there is no further attempt. An ignored SIGHUP (nohup) stays
// ignored.
//
// Restarts: with `max_restarts`, all ranks are started again after a failure, until the same failure occurs twice or
// `max_restarts` restarts were made without progress (restart_policy.h).
//
// Call from a process with one thread.
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
  std::vector<int> nproc_of_hosts = {};  // ranks on each host, when the numbers differ; `nproc` is then ignored
  int nnodes = 1;
  int node_rank = 0;
  std::string master = "";  // HOST:PORT of node 0; needed for several nodes
  // Name that distinguishes this run from others, equal on all nodes. Empty: TESSERA_RUN_ID, or else the program and a
  // hash of its arguments.
  std::string run_id = "";
  std::string token_file = "";  // file with a secret that ranks must know; empty: TESSERA_TOKEN, TESSERA_TOKEN_FILE
  std::chrono::milliseconds grace = std::chrono::seconds(3);  // from SIGTERM to SIGKILL once a rank has failed
  // After a signal that was passed on to the ranks: time from the end of the first rank to SIGKILL of the other ranks.
  std::chrono::milliseconds stop_grace = std::chrono::seconds(30);
  int max_restarts = 0;  // restarts without progress in between; equal on all hosts, which restart together
  // Returns the name of the run's last checkpoint; "" when there is no checkpoint, nullopt when the name cannot be read
  // now. The launcher calls this function at the start and after each failed attempt. The attempt has made progress if
  // the name has changed, so the name must change with every save. If this function is null, an attempt has made
  // progress if it has finished a step that no earlier attempt has finished (reported_steps.h).
  std::function<std::optional<std::string>()> last_checkpoint_name = nullptr;
  bool reports_steps = false;  // the program reports every finished step, so no report means no finished step
  bool stops_on_usr1 = false;  // SIGUSR1 asks the program to end, so there is no restart after it
  OutputOptions output{};
  PinMode pin = PinMode::kAuto;
};

// Runs the program `arguments[0]` with its arguments as the ranks of this host. Returns 0 when all ranks end with 0,
// otherwise the exit code of the first rank that failed in the last attempt; for a rank killed by signal n, 128 + n.
// Error kConfig for invalid options, or when `arguments[0]` is not an executable program.
int launch_local_ranks(const std::vector<std::string>& arguments, const LauncherOptions& options);

}  // namespace tessera::comm
