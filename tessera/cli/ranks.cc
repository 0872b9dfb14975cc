#include "tessera/cli/ranks.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/comm/launch/launcher.h"

namespace tessera::cli {

void add_launch_flags(CLI::App& app, LaunchFlags& flags) {
  app.add_option(
         "--max-restarts", flags.max_restarts,
         "Restart all ranks when one fails, at most N times without progress; the same failure twice at one step ends "
         "the run")
      ->option_text("N [0]");
  app.add_option("--log-dir", flags.log_dir,
                 "Write the output of each rank to DIR/RUN/attempt_N/RANK/stdout.log and stderr.log")
      ->option_text("DIR");
  app.add_flag("--tee", flags.tee, "With --log-dir: also show the output here, each line with its rank");
  app.add_option("--log-rank", flags.log_rank, "Show only the output of these local ranks: 0 or 0,2 [LOG_RANK]")
      ->option_text("RANKS [all]");
  app.add_option("--pin", flags.pin, "Bind ranks to their share of the cores and memory nodes: auto, on or off")
      ->option_text("MODE [auto]");
}

void apply_launch_flags(const LaunchFlags& flags, comm::LauncherOptions& options) {
  options.max_restarts = flags.max_restarts;
  options.pin = comm::parse_pin_mode(flags.pin);
  const char* log_rank_variable = std::getenv("LOG_RANK");
  const bool own = !flags.log_rank.empty();
  options.output = {.log_dir = flags.log_dir,
                    .tee = flags.tee,
                    .shown = comm::parse_log_ranks(own                 ? flags.log_rank
                                                   : log_rank_variable ? log_rank_variable
                                                                       : "",
                                                   own ? "--log-rank" : "LOG_RANK")};
}

namespace {

std::vector<std::string> command_of(const std::string& verb, VerbArguments args, int64_t nproc) {
  TESSERA_CHECK(nproc >= 1 && nproc <= 4096, ErrorKind::kConfig, "[{}] --nproc {}: wanted 1 to 4096", verb, nproc);
  std::vector<std::string> arguments = {std::filesystem::read_symlink("/proc/self/exe").string(), verb};
  arguments.insert(arguments.end(), args.begin(), args.end());
  return arguments;
}

bool is_launched_rank() { return comm::launcher_name(comm::process_environment()) != "single"; }

// Warns on rank 0 that --max-restarts has no effect when another launcher started this rank: only the launcher can
// restart ranks. There is no warning if our own launcher started this rank with the same --max-restarts, because it
// passes its flags on to its ranks.
void warn_ignored_restarts(int max_restarts) {
  const auto environment = comm::process_environment();
  const auto source = comm::launcher_name(environment);
  const bool launched_with_it =
      source == "flags" && environment("TORCHELASTIC_MAX_RESTARTS") == std::to_string(max_restarts);
  if (max_restarts == 0 || launched_with_it) return;
  for (const char* name : {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    const auto rank = environment(name);
    if (rank && *rank != "0") return;
    if (rank) break;
  }
  log_warning("[launch] --max-restarts {}: has no effect, because {} started this rank. Configure restarts there.",
              max_restarts, source == "flags" ? "'tessera launch'" : source);
}

}  // namespace

std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc) {
  const auto arguments = command_of(verb, args, nproc);
  if (nproc <= 1 || is_launched_rank()) return std::nullopt;
  return comm::launch_local_ranks(arguments, {.nproc = static_cast<int>(nproc)});
}

std::optional<int> launch_ranks(const std::string& verb, VerbArguments args, int64_t nproc, const LaunchFlags& flags,
                                const std::filesystem::path& checkpoints) {
  const auto arguments = command_of(verb, args, nproc);
  comm::LauncherOptions options{.nproc = static_cast<int>(nproc)};
  apply_launch_flags(flags, options);
  // A single rank needs a launcher, too, if the launcher must restart it after a failure or store its output.
  const bool launches = nproc > 1 || flags.max_restarts > 0 || !flags.log_dir.empty() || flags.tee;
  if (is_launched_rank()) warn_ignored_restarts(flags.max_restarts);
  if (!launches || is_launched_rank()) return std::nullopt;
  // When the run has written a new checkpoint, the launcher counts its restarts from 0 again, up to max_restarts. If
  // the folder of checkpoints cannot be read at this moment, this is no error, and the launcher assumes that there is
  // no new checkpoint.
  options.last_checkpoint_name = [checkpoints]() -> std::optional<std::string> {
    try {
      return CheckpointFolder::latest_name(checkpoints).value_or("");
    } catch (const Error&) {  // the run itself reports a damaged folder
      return std::nullopt;
    }
  };
  options.reports_steps = true;
  options.stops_on_usr1 = true;
  return comm::launch_local_ranks(arguments, options);
}

std::shared_ptr<comm::World> join_world(const comm::RendezvousFlags& flags) {
  return is_launched_rank() ? comm::World::connect(flags) : comm::World::single();
}

}  // namespace tessera::cli
