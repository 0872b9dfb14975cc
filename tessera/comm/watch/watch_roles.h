// The two roles in a watch: rank 0 is the hub, which hears of every end and asks around whose fault a trouble is; all
// others are spokes, which answer and hear the verdict. Internal to comm: start_watchdog() makes them.
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
  // `compare`: asks the ranks where they are when one reports trouble.
  WatchHub(std::chrono::milliseconds silence, bool compare, PeerListener& listener);
  ~WatchHub() override { leave(false); }
  // Tells all that have been admitted that all are there.
  void welcome_all() { tell_all({FrameKind::kHello, 0}); }
  // Tells them that there will be no watch.
  void dismiss_all() { tell_all({FrameKind::kBye, 0}); }
  // Tells them why the watch cannot begin, an error for all.
  void refuse_all(const std::string& why);

 private:
  struct Inquiry {
    Trouble trouble;
    int rank = 0;  // that reported it
    std::chrono::steady_clock::time_point begun{};
    std::map<int, FlightRecord> answers;
  };

  void send_own(const Frame& frame) override { receive(0, frame); }
  void receive(int from, const Frame& frame) override;
  void lose(int peer, bool silent) override;
  void on_tick() override;
  void inquire(int rank, Trouble trouble);
  void settle(const Verdict& verdict);

  const bool compare_;
  std::optional<Inquiry> inquiry_;
  std::optional<Verdict> verdict_;
  std::set<int> left_;
};

}  // namespace tessera::comm
