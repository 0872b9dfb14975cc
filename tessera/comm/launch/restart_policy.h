// Decides whether a launcher restarts its ranks after a rank has failed. No processes, no files. Internal to comm.
//
//   RestartPolicy policy({.max_restarts = 3, .has_marks = true, .reports_steps = true}, "");
//   const auto decision = policy.decide(failure, {.step = 37, .mark = "step-00000030"});
//   if (decision.restarts) log_warning("{}", decision.text); else std::fputs(decision.text ...);
//
// At most max_restarts restarts are allowed without progress in between. Progress is a new name of the last checkpoint
// (AttemptProgress::mark), or, for a program without such names, a step that no earlier attempt has finished. The same
// failure twice at one step is a defect of the program: a third attempt would end the same way. Deaths by a signal from
// outside the run never count as the same failure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::comm {

struct RankFailure {
  std::string text{};   // "rank 1 of 4: [train] ...", one line
  std::string cause{};  // the same text without the rank
  int exit_code = 1;
  bool from_outside = false;  // killed by SIGKILL, SIGTERM, SIGINT or SIGHUP, and not for lack of memory
};

struct AttemptProgress {
  std::optional<int64_t> step{};      // last finished step; nullopt: none, or not known
  std::optional<std::string> mark{};  // name of the last checkpoint, "": none yet; nullopt: no marks, or not readable
};

struct RestartDecision {
  bool restarts = false;
  int attempt = 0;   // the number of restarts so far, this one included
  int tries = 0;     // restarts since the last progress, this one included
  std::string text;  // the reason, in one line; "" when max_restarts is 0
};

class RestartPolicy {
 public:
  struct Options {
    int max_restarts = 0;
    bool has_marks = false;      // progress is measured by marks, not by steps
    bool reports_steps = false;  // the program reports every step, so no report means no finished step
  };
  // `before`: the name of the last checkpoint before this run; "" when there is none.
  RestartPolicy(Options options, std::string before) : options_(options), mark_(std::move(before)) {}

  RestartDecision decide(const RankFailure& failure, const AttemptProgress& progress);

 private:
  bool has_progressed(const AttemptProgress& progress);

  const Options options_;
  std::string mark_;
  int64_t furthest_ = -1;        // highest step that an attempt has finished
  int attempts_ = 0, used_ = 0;  // restarts in all, and since the last progress
  std::optional<RankFailure> last_;
  std::optional<int64_t> last_step_;
};

}  // namespace tessera::comm
