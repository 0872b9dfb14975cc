#include "tessera/comm/launch/restart_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace tessera::comm {
namespace {

// Removes the digits from the text of a failure, because process ids, ports, byte counts and ranks differ between
// failures of one kind.
std::string without_numbers(std::string text) {
  std::erase_if(text, [](unsigned char c) { return c >= '0' && c <= '9'; });
  return text;
}

bool are_same_failure(const RankFailure& one, const RankFailure& other) {
  return !one.from_outside && !other.from_outside && one.exit_code == other.exit_code &&
         without_numbers(one.cause) == without_numbers(other.cause);
}

std::string step_words(std::optional<int64_t> step) {
  return step ? fmt::format("after step {}", *step) : "before its first step";
}

}  // namespace

// AttemptProgress::mark is nullopt when the name of the last checkpoint could not be read. This is no progress, and
// mark_ is not changed.
bool RestartPolicy::has_progressed(const AttemptProgress& progress) {
  const bool further = progress.step.value_or(-1) > furthest_;
  furthest_ = std::max(furthest_, progress.step.value_or(-1));
  if (!options_.has_marks) return further;
  return progress.mark && std::exchange(mark_, *progress.mark) != *progress.mark;
}

// There is no restart, in this order of checks, when max_restarts is 0, when the same failure has occurred twice at one
// step, or after max_restarts restarts without progress. The second check needs a known step: otherwise the two
// failures may be at different steps.
RestartDecision RestartPolicy::decide(const RankFailure& failure, const AttemptProgress& progress) {
  if (options_.max_restarts == 0) return {};
  const bool knows_step = progress.step || options_.reports_steps;
  const bool again = last_ && knows_step && last_step_ == progress.step && are_same_failure(*last_, failure);
  if (again) {
    return {.restarts = false,
            .attempt = attempts_,
            .text = fmt::format("no restart: the same failure twice {}. First: {}. Then: {}", step_words(progress.step),
                                last_->text, failure.text)};
  }
  if (has_progressed(progress)) used_ = 0;
  if (used_ >= options_.max_restarts) {
    return {.restarts = false,
            .attempt = attempts_,
            .text = fmt::format("no restart: {} restarts without progress, as many as --max-restarts allows", used_)};
  }
  last_ = failure;
  last_step_ = progress.step;
  ++used_;
  ++attempts_;
  return {.restarts = true,
          .attempt = attempts_,
          .tries = used_,
          .text = fmt::format("{}{}", failure.text, knows_step ? fmt::format(" ({})", step_words(progress.step)) : "")};
}

}  // namespace tessera::comm
