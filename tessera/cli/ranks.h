// The ranks of a verb: starts them for --nproc N, and connects each of them to their world.
//
//   LaunchFlags flags;
//   add_launch_flags(*app, flags);                                            // --max-restarts, --log-dir, ...
//   if (const auto code = launch_ranks("score", args, nproc)) return *code;   // this process was the launcher
//   const auto world = join_world({.nproc = static_cast<int>(nproc)});        // this process is a rank
//
// Launching forks, so the process must have only one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "tessera/cli/verbs.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace CLI {
class App;
}

namespace tessera::comm {
struct LauncherOptions;
}

namespace tessera::cli {

// Flags of the launcher that `tessera launch` and `tessera train` share.
struct LaunchFlags {
  int max_restarts = 0;
  std::string log_dir = "", log_rank = "", pin = "auto";
  bool tee = false;
};
void add_launch_flags(CLI::App& app, LaunchFlags& flags);
// Copies the flags into the options. Without --log-rank the environment variable LOG_RANK is used. Error kConfig.
void apply_launch_flags(const LaunchFlags& flags, comm::LauncherOptions& options);

// If `nproc` is above 1 and no launcher (ours, torchrun, srun, mpirun) has started this process as a rank: runs
// `tessera VERB args` in nproc processes and returns their exit code. Otherwise returns nothing. Error kConfig unless
// nproc is 1 to 4096.
std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc);
// Like launch_ranks() above, with flags for the launcher. Also launches a single rank if the flags ask for restarts or
// for storing its output. `checkpoints`: the folder whose file LATEST names the newest checkpoint; a new one counts as
// progress of the run.
std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc, const LaunchFlags& flags,
                                const std::filesystem::path& checkpoints);

// comm::World::connect() if a launcher started this process as a rank, else a world of one rank. COLLECTIVE over all
// ranks.
std::shared_ptr<comm::World> join_world(const comm::RendezvousFlags& flags);

}  // namespace tessera::cli
