#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/ranks.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::cli {
namespace {

// Parses --nproc: "4" for every host, or "4,2" and "8(x3),4" for hosts with different numbers of ranks.
std::vector<int> ranks_on_hosts(const std::string& nproc) {
  try {
    return comm::expand_tasks_per_node(nproc);
  } catch (const Error&) {
    raise(ErrorKind::kConfig,
          "[launch] --nproc '{}': wanted a number from 1 to 4096, or one for each host: 4,2 or 8(x3),4", nproc);
  }
}

// Accepts torchrun's spelling of flags: underscores become hyphens. A flag of torchrun that has another name here is an
// error that gives this name.
std::vector<std::string> normalize_torchrun_flags(VerbArguments args) {
  static const std::vector<std::pair<std::string, const char*>> kOthers = {
      {"--standalone", "leave it out: without --nnodes all ranks are on this host"},
      {"--rdzv", "several hosts meet at --master HOST:PORT, with --nnodes, --node-rank and --run-id"},
      {"--master-addr", "use --master HOST:PORT"},
      {"--master-port", "use --master HOST:PORT"},
      {"--redirects", "use --log-dir DIR"},
      {"--local-ranks-filter", "use LOG_RANK"}};
  std::vector<std::string> own(args.begin(), args.end());
  for (auto& word : own) {
    if (!word.starts_with("--")) continue;
    std::replace(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(std::min(word.find('='), word.size())), '_',
                 '-');
    for (const auto& [flag, advice] : kOthers) {
      TESSERA_CHECK(!word.starts_with(flag), ErrorKind::kConfig, "[launch] {} is torchrun's: {}.", word, advice);
    }
  }
  return own;
}

}  // namespace

int run_launch(VerbArguments args) {
  const auto app = make_app("launch");
  comm::LauncherOptions options;
  std::string nproc = "1";
  app->add_option("--nproc,--nproc-per-node", nproc,
                  "Ranks per host, or a list with one number per host: 4,2 or 8(x3),4")
      ->option_text("N [1]");
  app->add_option("--nnodes", options.nnodes, "Number of hosts; start 'tessera launch' on each of them")
      ->option_text("N [1]");
  app->add_option("--node-rank", options.node_rank, "Number of this host, counted from 0")->option_text("N [0]");
  app->add_option("--master", options.master, "An address of host 0 and a free port there")->option_text("HOST:PORT");
  app->add_option("--run-id", options.run_id, "Name of the run, the same on all of its hosts and unique among runs")
      ->option_text("NAME [PROG and a hash of ARGS]");
  app->add_option("--token-file", options.token_file,
                  "File with a secret that a rank needs to join; the same on all hosts [TESSERA_TOKEN_FILE]")
      ->option_text("FILE");
  LaunchFlags flags;
  add_launch_flags(*app, flags);
  app->footer(
      "The program follows after --: tessera launch [FLAGS] -- PROG [ARGS ...]\n"
      "The environment of each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
      "as under\n"
      "torchrun, and OMP_NUM_THREADS = usable cores / N unless it is set. When one rank fails, the others are ended "
      "within 5 s\n"
      "and its exit code is returned; with --max-restarts all ranks are restarted instead. A program may write the "
      "number of\n"
      "its last finished step to the file TESSERA_PROGRESS_FILE: progress then resets the count of restarts.");
  // Only the words before "--" are flags of this verb; the words after it belong to the program and are not parsed.
  const auto dashes = std::ranges::find(args, "--");
  const auto own = normalize_torchrun_flags(args.first(static_cast<size_t>(dashes - args.begin())));
  if (const auto code = parse_flags(*app, own)) return *code;
  TESSERA_CHECK(dashes != args.end() && dashes + 1 != args.end(), ErrorKind::kConfig,
                "[launch] no program given. Usage: tessera launch --nproc N -- PROG [ARGS ...].");
  apply_launch_flags(flags, options);
  const std::vector<int> on_hosts = ranks_on_hosts(nproc);
  options.nproc = on_hosts.front();
  if (on_hosts.size() > 1) options.nproc_of_hosts = on_hosts;
  return comm::launch_local_ranks(std::vector<std::string>(dashes + 1, args.end()), options);
}

}  // namespace tessera::cli
