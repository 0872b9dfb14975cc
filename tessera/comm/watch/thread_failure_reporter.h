// The failure reporter of ranks that are threads of one process. The counterpart of WatchdogLoop without sockets and
// without a watch for deaths: a thread cannot die alone. Internal to comm.
//
//   auto state = std::make_shared<ThreadRankState>();
//   auto reporter = std::make_unique<ThreadFailureReporter>(state, rank, listener);
//
// Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "tessera/comm/watch/failure_reporter.h"

namespace tessera::comm {

// State that the ranks share.
struct ThreadRankState {
  std::mutex mutex;  // guards all members; held while listeners are called, so that leave() waits for the calls
  std::map<int, FailureListener*> present;  // by rank
  std::set<int> left;                       // ranks that have left
  bool report_made = false;                 // the failure report has been made
};

class ThreadFailureReporter final : public FailureReporter {
 public:
  ThreadFailureReporter(std::shared_ptr<ThreadRankState> state, int rank, FailureListener& listener);
  ~ThreadFailureReporter() override { leave(false); }
  bool report_call_failure(const CallFailure& failure) override;
  void report_rank_failure(const std::string&) override {}  // run_thread_ranks() aborts the other ranks
  bool detects_dead_ranks() const override { return false; }
  void leave(bool failed) noexcept override;

 private:
  std::shared_ptr<ThreadRankState> state_;
  const int rank_;
};

}  // namespace tessera::comm
