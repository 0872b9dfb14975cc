// One attempt: starts the ranks of this host and supervises them until all have ended. Internal to comm.
//
//   const AttemptResult end = run_attempt(plan, 0, "", signals, outputs);
//   if (end.failure) ...                     // which rank failed, and why
//
// When run_attempt() returns, no process of the attempt is left.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/launch/core_shares.h"
#include "tessera/comm/launch/launch_signals.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/launch/rank_output.h"
#include "tessera/comm/launch/restart_policy.h"

namespace tessera::comm {

struct LaunchPlan {
  const std::vector<std::string>& arguments;
  const LauncherOptions& options;
  int first_rank = 0, world_size = 1;
  std::string id;  // TORCHELASTIC_RUN_ID of the ranks
  CoreShares cores;
};

struct AttemptResult {
  int exit_code = 0;
  bool asked_to_stop = false;             // the launcher received a signal that asks the run to end
  bool died_of_forwarded_signal = false;  // the rank died by that passed-on signal: no error is printed
  std::optional<RankFailure> failure{};   // of the rank that failed first
  bool consequence = false;               // that rank failed because a rank of another host failed
  std::optional<int64_t> step{};          // last finished step, if rank 0 has reported one
  // Last lines of stderr of the failed rank, where the terminal did not show them, and the file that holds its stderr.
  std::string last_stderr_lines{}, stderr_path{};
};

// `restart_reason`: why the ranks are started again; empty for the first attempt.
AttemptResult run_attempt(const LaunchPlan& plan, int attempt, const std::string& restart_reason, SignalQueue& signals,
                          RankOutputs& outputs);

}  // namespace tessera::comm
