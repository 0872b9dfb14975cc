#include "tessera/cli/ranks.h"

#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/world.h"

namespace tessera::cli {

std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc) {
  TESSERA_CHECK(nproc >= 1 && nproc <= 4096, ErrorKind::kConfig, "[{}] --nproc {}: wanted 1 to 4096", verb, nproc);
  if (nproc <= 1 || comm::who_started(comm::process_environment()) != "single") return std::nullopt;
  std::vector<std::string> arguments = {std::filesystem::read_symlink("/proc/self/exe").string(), verb};
  arguments.insert(arguments.end(), args.begin(), args.end());
  return comm::launch_local_ranks(arguments, {.nproc = static_cast<int>(nproc)});
}

std::shared_ptr<comm::World> connect_world(const WorldSettings& settings) {
  return comm::World::connect(
      {.nproc = static_cast<int>(settings.nproc),
       .backend = settings.backend,
       .timeout = std::chrono::milliseconds(static_cast<int64_t>(settings.timeout_seconds * 1000)),
       .check = settings.check,
       .trace_folder = settings.trace_folder});
}

}  // namespace tessera::cli
