// The two roles of a watchdog. Rank 0 is the hub: it notices the end of every rank, collects flight records when a rank
// reports a failed collective, and sends the failure report to all ranks. All other ranks are spokes: they send their
// records and receive the report. Internal to comm: start_watchdog() makes them.
//
//   auto hub = std::make_unique<WatchdogHub>(silence, compare, listener);
//   hub->add_peer(rank, std::move(socket), std::move(frames));
//   hub->confirm_all();  hub->begin();
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>

#include "tessera/comm/watch/watchdog_loop.h"

namespace tessera::comm {

class WatchdogSpoke final : public WatchdogLoop {
 public:
  using WatchdogLoop::WatchdogLoop;
  ~WatchdogSpoke() override { leave(false); }

 private:
  void send_own(const WatchdogFrame& frame) override { send(0, frame); }
  void receive(int from, const WatchdogFrame& frame) override;
  void on_lost_peer(int peer, bool silent) override;
};

class WatchdogHub final : public WatchdogLoop {
 public:
  // `compare`: collect the ranks' flight records when a rank reports a failed collective.
  WatchdogHub(std::chrono::milliseconds silence, bool compare, FailureListener& listener);
  ~WatchdogHub() override { leave(false); }
  // Informs all connected ranks that all ranks are connected.
  void confirm_all() { send_to_all({WatchdogFrameKind::kHello, 0}); }
  // Informs all connected ranks that the run continues without a watchdog.
  void dismiss_all() { send_to_all({WatchdogFrameKind::kBye, 0}); }
  // Sends all connected ranks the reason why the watchdog cannot start. Each of these ranks throws an Error with the
  // text `why`.
  void refuse_all(const std::string& why);

 private:
  // The search for the cause of one reported failure.
  struct CauseSearch {
    CallFailure failure;
    int rank = 0;  // the rank that reported it
    std::chrono::steady_clock::time_point begun{};
    std::map<int, FlightRecord> answers;  // by rank
  };

  void send_own(const WatchdogFrame& frame) override { receive(0, frame); }
  void receive(int from, const WatchdogFrame& frame) override;
  void on_lost_peer(int peer, bool silent) override;
  void on_tick() override;
  void start_cause_search(int rank, CallFailure failure);
  void publish_report(const FailureReport& report);

  const bool compare_;
  std::optional<CauseSearch> search_;
  std::optional<FailureReport> report_;  // the failure report, once it is made
  std::set<int> left_;                   // ranks that have sent a bye
};

}  // namespace tessera::comm
