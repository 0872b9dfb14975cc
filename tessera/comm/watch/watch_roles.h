// The two roles of a watchdog. Rank 0 is the hub: it notices the end of every rank, collects flight records when a rank
// reports a failed collective, and sends the failure report to all ranks. All other ranks are spokes: they send their
// records and receive the report. Internal to comm: start_watchdog() makes them.
//
//   auto hub = std::make_unique<WatchHub>(silence, compare, listener);
//   hub->admit(rank, std::move(socket), std::move(frames));
//   hub->welcome_all();  hub->begin();
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>

#include "tessera/comm/watch/watch_loop.h"

namespace tessera::comm {

class WatchSpoke final : public WatchLoop {
 public:
  using WatchLoop::WatchLoop;
  ~WatchSpoke() override { leave(false); }

 private:
  void send_own(const Frame& frame) override { send(0, frame); }
  void receive(int from, const Frame& frame) override;
  void lose(int peer, bool silent) override;
};

class WatchHub final : public WatchLoop {
 public:
  // `compare`: collect the ranks' flight records when a rank reports a failed collective.
  WatchHub(std::chrono::milliseconds silence, bool compare, PeerListener& listener);
  ~WatchHub() override { leave(false); }
  // Informs all connected ranks that all ranks are connected.
  void welcome_all() { tell_all({FrameKind::kHello, 0}); }
  // Informs all connected ranks that there will be no watch.
  void dismiss_all() { tell_all({FrameKind::kBye, 0}); }
  // Informs all connected ranks why the watch cannot begin; each of them throws the error.
  void refuse_all(const std::string& why);

 private:
  // The search for the cause of one reported trouble.
  struct Inquiry {
    Trouble trouble;
    int rank = 0;  // the rank that reported it
    std::chrono::steady_clock::time_point begun{};
    std::map<int, FlightRecord> answers;  // by rank
  };

  void send_own(const Frame& frame) override { receive(0, frame); }
  void receive(int from, const Frame& frame) override;
  void lose(int peer, bool silent) override;
  void on_tick() override;
  void inquire(int rank, Trouble trouble);
  void settle(const Verdict& verdict);

  const bool compare_;
  std::optional<Inquiry> inquiry_;
  std::optional<Verdict> verdict_;  // the failure report, once it is made
  std::set<int> left_;              // ranks that have sent a bye
};

}  // namespace tessera::comm
