#include "tessera/comm/watch/thread_failure_reporter.h"

namespace tessera::comm {

ThreadFailureReporter::ThreadFailureReporter(std::shared_ptr<ThreadRankState> state, int rank,
                                             FailureListener& listener)
    : state_(std::move(state)), rank_(rank) {
  const std::lock_guard lock(state_->mutex);
  state_->present[rank_] = &listener;
}

// Only time-outs are diagnosed. A broken connection means that another thread has thrown, and run_thread_ranks()
// rethrows that thread's exception.
bool ThreadFailureReporter::report_call_failure(const CallFailure& failure) {
  const std::lock_guard lock(state_->mutex);
  if (state_->report_made) return true;
  if (!failure.timed_out) return false;
  state_->report_made = true;
  std::vector<FlightRecord> records;
  for (const auto& [peer, listener] : state_->present) {
    records.push_back(listener->recent_calls(failure.group, failure.sequence));
  }
  const FailureReport report = make_failure_report(records, state_->left, failure, rank_);
  for (const auto& [peer, listener] : state_->present) listener->on_failure_report(report);
  return true;
}

void ThreadFailureReporter::leave(bool) noexcept {
  if (!state_) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->present.erase(rank_);
    state_->left.insert(rank_);
  }
  state_.reset();
}

}  // namespace tessera::comm
