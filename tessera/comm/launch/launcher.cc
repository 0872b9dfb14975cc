#include "tessera/comm/launch/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/endpoint.h"
#include "tessera/base/text/random_hex.h"
#include "tessera/comm/launch/attempt.h"
#include "tessera/comm/launch/launcher_rendezvous.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

void check_program(const std::string& name) {
  std::vector<std::string> candidates = {name};
  if (name.find('/') == name.npos) {
    candidates.clear();
    const char* path = std::getenv("PATH");
    std::string_view rest = path ? path : "/bin:/usr/bin";
    while (!rest.empty()) {
      const size_t end = std::min(rest.find(':'), rest.size());
      candidates.push_back(std::string(rest.substr(0, end)) + "/" + name);
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  for (const auto& candidate : candidates) {
    std::error_code ignored;
    if (fs::is_regular_file(candidate, ignored) && ::access(candidate.c_str(), X_OK) == 0) return;
  }
  raise(ErrorKind::kConfig, "[launch] {}: no such program, or it is not executable", name);
}

// Makes a name of the run from its command line. All hosts of a run make the same name, and a run of another command at
// the same port has another name. Processes outside the run may read the name, and the arguments may hold secrets: the
// name therefore consists of the program's name and a hash of the arguments.
std::string name_of(const std::vector<std::string>& arguments) {
  std::string program = fs::path(arguments[0]).filename().string(), all = program;
  for (size_t i = 1; i < arguments.size(); ++i) all += '\0' + arguments[i];
  program = program.substr(0, 160);
  std::replace(program.begin(), program.end(), '\n', ' ');
  return fmt::format("{} ({:016x})", program, std::hash<std::string>()(all));
}

// Global rank of the first rank of this host, and the world size.
struct RankRange {
  int first = 0, size = 0;
};

RankRange range_of_host(const LauncherOptions& options) {
  if (options.nproc_of_hosts.empty()) return {options.node_rank * options.nproc, options.nnodes * options.nproc};
  const auto begin = options.nproc_of_hosts.begin();
  return {std::accumulate(begin, begin + options.node_rank, 0),
          std::accumulate(begin, options.nproc_of_hosts.end(), 0)};
}

// Returns the id of this launch: --run-id if it is given; else on one host a random name. On several hosts it is
// TESSERA_RUN_ID, or without this variable the result of name_of(), because the id must be equal on all hosts.
std::string id_of(const std::vector<std::string>& arguments, const LauncherOptions& options) {
  if (!options.run_id.empty()) return options.run_id;
  if (options.nnodes == 1) return "run-" + random_hex(8);
  const char* run_id = std::getenv("TESSERA_RUN_ID");
  return run_id && *run_id ? run_id : name_of(arguments);
}

void print_end(const AttemptResult& end, const std::string& why_no_restart) {
  if (end.died_of_forwarded_signal) return;  // the rank died by the signal that the user sent: no error
  const std::string text = fmt::format("{}tessera: error: {}{}\n", end.last_stderr_lines, end.failure->text,
                                       end.stderr_path.empty() ? "" : ". Its output is in " + end.stderr_path);
  std::fputs(text.c_str(), stderr);
  if (!why_no_restart.empty()) std::fprintf(stderr, "tessera: error: [launch] %s\n", why_no_restart.c_str());
}

// Pauses between two attempts. Before the first restart since the last progress there is no pause, before the second
// one a pause of 400 ms; each further pause is twice as long, up to 10 s. Returns false when a signal asks the run to
// end.
bool pause_before_restart(int tries, const SignalQueue& signals) {
  constexpr milliseconds kLongest{10'000};
  const milliseconds rest = tries < 2 ? milliseconds(0) : std::min(milliseconds(100 << std::min(tries, 10)), kLongest);
  const auto end = std::chrono::steady_clock::now() + rest;
  for (;;) {
    if (asked_to_stop(signals)) return false;
    const auto left = std::chrono::ceil<milliseconds>(end - std::chrono::steady_clock::now());
    if (left <= milliseconds(0)) return true;
    signals.wait(left);
  }
}

// The loop over attempts. On several hosts, the launchers meet after each attempt and host 0 decides for all, so that
// all hosts restart or none does; on one host this launcher decides.
int run_and_restart(const std::vector<std::string>& arguments, const LauncherOptions& options) {
  const RankRange range = range_of_host(options);
  const LaunchPlan plan{.arguments = arguments,
                        .options = options,
                        .first_rank = range.first,
                        .world_size = range.size,
                        .id = id_of(arguments, options),
                        .cores = share_cores(read_cores(), options.nproc, options.pin, process_environment())};
  log_debug("[launch] {} threads per rank; {}", plan.cores.threads,
            plan.cores.unbound_reason.empty() ? "bound to cores" : "not bound to cores: " + plan.cores.unbound_reason);
  const auto mark = [&]() -> std::optional<std::string> {
    return options.last_checkpoint_name ? options.last_checkpoint_name() : std::nullopt;
  };
  RestartPolicy policy({.max_restarts = options.max_restarts,
                        .has_marks = options.last_checkpoint_name != nullptr,
                        .reports_steps = options.reports_steps},
                       mark().value_or(""));
  SignalQueue signals;
  const Subreaper subreaper;
  RankOutputs outputs(options.output, plan.id);
  if (!outputs.folder().empty()) log_info("[launch] the ranks' output is in {}", outputs.folder().string());
  const auto decide = [&](const RankFailure& failure, std::optional<int64_t> step) {
    return policy.decide(failure, {.step = step, .mark = mark()});
  };
  std::optional<LauncherRendezvous> rendezvous;
  if (options.nnodes > 1 && options.max_restarts > 0) rendezvous.emplace(options, plan.id);
  std::string reason;
  for (int attempt = 0;; ++attempt) {
    const AttemptResult end = run_attempt(plan, attempt, reason, signals, outputs);
    JointRestartDecision common{.exit_code = end.exit_code};
    if (rendezvous) {
      common = rendezvous->meet(attempt, end, decide, signals);
    } else if (end.failure && !end.asked_to_stop) {
      common.decision = decide(*end.failure, end.step);
    }
    const RestartDecision& decision = common.decision;
    if (!decision.restarts) {
      if (end.failure) print_end(end, decision.text);
      return end.exit_code != 0 ? end.exit_code : common.exit_code;
    }
    reason = decision.text;
    std::fputs(end.last_stderr_lines.c_str(), stderr);
    log_warning("[launch] restart {}: {}", decision.attempt, reason);
    if (pause_before_restart(decision.tries, signals)) continue;
    log_warning("[launch] asked to stop before restart {}", decision.attempt);
    return common.exit_code;
  }
}

}  // namespace

int launch_local_ranks(const std::vector<std::string>& arguments, const LauncherOptions& user_options) {
  LauncherOptions options = user_options;
  TESSERA_CHECK(!arguments.empty(), ErrorKind::kConfig,
                "[launch] no program given. Usage: tessera launch --nproc N -- PROG ...");
  const auto check_nproc = [](int nproc) {
    TESSERA_CHECK(nproc >= 1 && nproc <= 4096, ErrorKind::kConfig, "[launch] --nproc {}: wanted 1 to 4096", nproc);
  };
  TESSERA_CHECK(options.nnodes >= 1 && options.nnodes <= 65536, ErrorKind::kConfig,
                "[launch] --nnodes {}: wanted 1 to 65536", options.nnodes);
  TESSERA_CHECK(options.node_rank >= 0 && options.node_rank < options.nnodes, ErrorKind::kConfig,
                "[launch] --node-rank {}: wanted 0 to {}, for --nnodes {}", options.node_rank, options.nnodes - 1,
                options.nnodes);
  if (options.nproc_of_hosts.empty()) {
    check_nproc(options.nproc);
  } else {
    TESSERA_CHECK(options.nproc_of_hosts.size() == static_cast<size_t>(options.nnodes), ErrorKind::kConfig,
                  "[launch] --nproc for {} hosts, --nnodes {}: wanted a number for each host",
                  options.nproc_of_hosts.size(), options.nnodes);
    for (const int nproc : options.nproc_of_hosts) check_nproc(nproc);
    options.nproc = options.nproc_of_hosts[options.node_rank];
  }
  TESSERA_CHECK(options.nnodes == 1 || !options.master.empty(), ErrorKind::kConfig,
                "[launch] --nnodes {} needs --master HOST:PORT, an address of node 0", options.nnodes);
  if (!options.master.empty()) parse_endpoint(options.master, "--master");
  TESSERA_CHECK(options.token_file.empty() || ::access(options.token_file.c_str(), R_OK) == 0, ErrorKind::kConfig,
                "[launch] --token-file {}: {}", options.token_file, std::strerror(errno));
  check_program(arguments[0]);
  TESSERA_CHECK(options.max_restarts >= 0 && options.max_restarts <= 1'000'000, ErrorKind::kConfig,
                "[launch] --max-restarts {}: wanted 0 to 1000000", options.max_restarts);
  for (const int rank : options.output.shown) {
    TESSERA_CHECK(rank < options.nproc, ErrorKind::kConfig, "[launch] --log-rank {}: this host has ranks 0 to {}", rank,
                  options.nproc - 1);
  }
  std::fflush(nullptr);  // forked children would write buffered output a second time
  return run_and_restart(arguments, options);
}

}  // namespace tessera::comm
