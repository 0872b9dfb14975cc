// Exchange between the launchers of several hosts after an attempt: they find the first failure of all hosts and decide
// together whether all ranks are started again. Internal to comm.
//
//   LaunchersMeeting meeting(options, id);
//   const CommonEnd common = meeting.meet(attempt, end, decide, signals);     // COLLECTIVE over the launchers
//   if (common.decision.restarts) ...                                        // on all hosts, or on none
//
// The launcher of host 0 serves a store at --master during the exchange, and decides for all. The port is free then,
// because rank 0, which used it, has ended. While ranks run, no launcher listens.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/comm/launch/attempt.h"
#include "tessera/comm/launch/launch_signals.h"
#include "tessera/comm/launch/restart_policy.h"

namespace tessera::comm {

struct CommonEnd {
  RestartDecision decision{};
  int exit_code = 0;  // of the rank that failed first; 0: all ranks of all hosts have ended with 0
};

// Decides about a restart, given the failure that caused the others. Called on host 0 only.
using DecideRestart = std::function<RestartDecision(const Failure& failure, std::optional<int64_t> step)>;

class LaunchersMeeting {
 public:
  LaunchersMeeting(const LauncherOptions& options, std::string id);
  // COLLECTIVE over the launchers. No host restarts when a launcher does not connect within five minutes, or when a
  // launcher has been asked to stop.
  CommonEnd meet(int attempt, const AttemptEnd& own, const DecideRestart& decide, const Signals& signals) const;

 private:
  CommonEnd lead(int attempt, const AttemptEnd& own, const DecideRestart& decide, const Signals& signals) const;
  CommonEnd follow(int attempt, const AttemptEnd& own, const Signals& signals) const;

  const LauncherOptions& options_;
  std::string id_, token_;
};

}  // namespace tessera::comm
