// The ranks behind a verb: starting them for --nproc N, and joining their world.
//
//   LaunchFlags flags;
//   add_launch_flags(*app, flags);                                            // --max-restarts, --log-dir, ...
//   if (const auto code = launch_ranks("score", args, nproc)) return *code;   // this process was their launcher
//   const auto world = join_world({.nproc = static_cast<int>(nproc)});
//
// Call from a process with one thread.
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

// How a launcher treats its ranks, as `tessera launch` and verbs have it.
struct LaunchFlags {
  int max_restarts = 0;
  std::string log_dir = "", log_rank = "", pin = "auto";
  bool tee = false;
};
void add_launch_flags(CLI::App& app, LaunchFlags& flags);
// LOG_RANK stands for --log-rank where that is not given. Error kConfig.
void apply(const LaunchFlags& flags, comm::LauncherOptions& options);

// When --nproc asks for several ranks and nobody (our launcher, torchrun, srun, mpirun) has started this process
// as one, runs `tessera VERB args` in each of them and returns the exit code. Error kConfig unless it is 1 to 4096.
std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc);
// The same with the flags of a launcher, and for a single rank too when it is to be started again or logged.
// `checkpoints`: the folder whose LATEST tells progress.
std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc, const LaunchFlags& flags,
                                const std::filesystem::path& checkpoints);

// comm::World::connect(), or a world of one rank where nobody started this process as a rank. COLLECTIVE over all
// ranks.
std::shared_ptr<comm::World> join_world(const comm::RendezvousFlags& flags);

}  // namespace tessera::cli
