// Whether a launcher starts its ranks again after one has failed. No processes, no files. Internal to comm.
//
//   RestartPolicy policy(3);
//   const auto decision = policy.decide(failure, {.step = 37, .mark = "step-00000030"});
//   if (decision.restarts) log_warning("{}", decision.text); else std::fputs(decision.text ...);
//
// At most N restarts without progress in between; progress is another mark (of what was saved), or, where there are no
// marks, a step that no attempt before has done. Two alike failures at one step are the program's own: a third try
// would end the same way. A rank that somebody killed is never alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::comm {

struct Failure {
  std::string text{};   // "rank 1 of 4: [train] ...", one line
  std::string cause{};  // the same without the rank
  int exit_code = 1;
  bool from_outside = false;  // by a signal that no defect of the program sends
};

struct ProgressMade {
  std::optional<int64_t> step{};      // that was done last; nothing: not known, or none
  std::optional<std::string> mark{};  // of what was saved last, "" if nothing was; nothing: none, or not known
};

struct RestartDecision {
  bool restarts = false;
  int attempt = 0;   // the number of restarts so far, this one included
  int tries = 0;     // restarts since the last progress, this one included
  std::string text;  // why, in one line; "" when no restart was ever wanted
};

class RestartPolicy {
 public:
  struct Options {
    int max_restarts = 0;
    bool has_marks = false;    // progress is told by marks
    bool tells_steps = false;  // the program tells its steps: where it has told none, it has not begun the first
  };
  // `before`: the mark of what an earlier run had saved.
  RestartPolicy(Options options, std::string before) : options_(options), mark_(std::move(before)) {}

  RestartDecision decide(const Failure& failure, const ProgressMade& progress);

 private:
  bool has_gone_on(const ProgressMade& progress);

  const Options options_;
  std::string mark_;
  int64_t furthest_ = -1;  // step
  int attempts_ = 0, used_ = 0;
  std::optional<Failure> last_;
  std::optional<int64_t> last_step_;
};

}  // namespace tessera::comm
