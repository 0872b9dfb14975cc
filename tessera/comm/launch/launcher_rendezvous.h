// Exchange between the launchers of several hosts after an attempt: they find the first failure of all hosts and decide
// together whether all ranks are started again. Internal to comm.
//
//   LauncherRendezvous rendezvous(options, id);
//   const auto common = rendezvous.meet(attempt, end, decide, signals);    // COLLECTIVE over the launchers
//   if (common.decision.restarts) ...                                      // on all hosts, or on none
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

struct JointRestartDecision {
  RestartDecision decision{};
  int exit_code = 0;  // of the rank that failed first; 0: all ranks of all hosts have ended with 0
};

// Decides whether all ranks are started again. `failure` is the failure that caused those of the other ranks, and
// `step` is the last finished step that rank 0 has reported. The function is called on host 0 only.
using DecideRestart = std::function<RestartDecision(const RankFailure& failure, std::optional<int64_t> step)>;

class LauncherRendezvous {
 public:
  LauncherRendezvous(const LauncherOptions& options, std::string id);
  // Decides after the attempt `attempt` whether the ranks of all hosts are started again. `own` is the result of this
  // host's ranks; `decide` is called on host 0 only. No host starts its ranks again if a launcher does not connect
  // within five minutes, or was asked to stop before it sent its result. COLLECTIVE over the launchers.
  JointRestartDecision meet(int attempt, const AttemptResult& own, const DecideRestart& decide,
                            const SignalQueue& signals) const;

 private:
  JointRestartDecision decide_as_host_zero(int attempt, const AttemptResult& own, const DecideRestart& decide,
                                           const SignalQueue& signals) const;
  JointRestartDecision receive_decision(int attempt, const AttemptResult& own, const SignalQueue& signals) const;

  const LauncherOptions& options_;
  std::string id_, token_;
};

}  // namespace tessera::comm
