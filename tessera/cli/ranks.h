// The ranks behind a verb: starting them for --nproc N, and joining their world.
//
//   if (const auto code = launch_ranks("train", args, nproc)) return *code;   // this process was their launcher
//   const auto world = connect_world({.backend = recipe.comm.backend, .check = recipe.comm.check});
//
// Call from a process with one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tessera/cli/verbs.h"

namespace tessera::comm {
class World;
}

namespace tessera::cli {

// When --nproc asks for several ranks and nobody (our launcher, torchrun, srun, mpirun) has started this process
// as one, runs `tessera VERB args` in each of them and returns the exit code. Error kConfig unless it is 1 to 4096.
std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc);

struct WorldSettings {
  std::string backend = "auto";
  double timeout_seconds = 300;
  std::string check = "timeout";
  std::string trace_folder = "";  // of flight records
  int64_t nproc = 1;              // as given, to be checked against whoever started the ranks
};

// COLLECTIVE over all ranks.
std::shared_ptr<comm::World> connect_world(const WorldSettings& settings);

}  // namespace tessera::cli
