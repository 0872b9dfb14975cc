// One start of the ranks of this host, from the first process to the end of the last. Internal to comm.
//
//   const AttemptEnd end = run_attempt(plan, 0, "", signals, outputs);
//   if (end.failure) ...                     // which rank, and why
//
// When it returns no process of it is left.
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
  std::string id;  // of this launch: TORCHELASTIC_RUN_ID of its ranks
  CoreShares cores;
};

struct AttemptEnd {
  int exit_code = 0;
  bool asked_to_stop = false;           // by a signal to the launcher
  bool told = false;                    // ... which is all that there is to say of it
  std::optional<Failure> failure{};     // of the rank at fault
  bool consequence = false;             // it fell with one of another host
  std::optional<int64_t> step{};        // that was done last, if rank 0 has told
  std::string last_words{}, kept_in{};  // of that rank, where its output was not shown
};

// `restart_reason`: why it is not the first one.
AttemptEnd run_attempt(const LaunchPlan& plan, int attempt, const std::string& restart_reason, Signals& signals,
                       RankOutputs& outputs);

}  // namespace tessera::comm
