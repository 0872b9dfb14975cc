// The launchers of several hosts between two attempts: what ended the ranks of all, and whether all start again.
// Internal to comm.
//
//   LaunchersMeeting meeting(options, id);
//   const CommonEnd common = meeting.meet(attempt, end, decide, signals);     // COLLECTIVE over the launchers
//   if (common.decision.restarts) ...                                        // on all hosts, or on none
//
// They meet where their ranks had met, at --master, whose port is free once rank 0 has ended: the launcher of host 0
// serves a store there for as long as it takes, and decides for all. Nobody listens while ranks run.
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
  int exit_code = 0;  // of the rank at fault; 0: all ranks of all hosts have ended well
};

// Of the failure that brought about the others; asked on host 0.
using DecideRestart = std::function<RestartDecision(const Failure& failure, std::optional<int64_t> step)>;

class LaunchersMeeting {
 public:
  LaunchersMeeting(const LauncherOptions& options, std::string id);
  // Where a launcher does not come within five minutes after another, or somebody is asked to stop, nobody starts
  // again.
  CommonEnd meet(int attempt, const AttemptEnd& own, const DecideRestart& decide, const Signals& signals) const;

 private:
  CommonEnd lead(int attempt, const AttemptEnd& own, const DecideRestart& decide, const Signals& signals) const;
  CommonEnd follow(int attempt, const AttemptEnd& own, const Signals& signals) const;

  const LauncherOptions& options_;
  std::string id_, token_;
};

}  // namespace tessera::comm
