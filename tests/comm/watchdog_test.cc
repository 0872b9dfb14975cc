// The watchdogs of a world: ranks that leave without an error, a rank that cannot connect, and the wire format.
#include "tessera/comm/watch/watchdog.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/watch/failure_reporter.h"

namespace tessera::comm {
namespace {

class Listener final : public FailureListener {
 public:
  FlightRecord recent_calls(uint32_t, uint64_t) override { return {}; }
  void on_failure_report(const FailureReport& report) override {
    const std::lock_guard lock(mutex_);
    heard_ += report.text;
  }
  std::string heard() const {
    const std::lock_guard lock(mutex_);
    return heard_;
  }

 private:
  mutable std::mutex mutex_;
  std::string heard_;
};

// Binds all threads to one core. A thread that sends a message is then often preempted by the thread that it wakes.
class OnOneCore {
 public:
  OnOneCore() {
    ::sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &before_)) continue;
      CPU_SET(core, &one);
      break;
    }
    ::sched_setaffinity(0, sizeof one, &one);
  }
  ~OnOneCore() { ::sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_{};
};

// Runs ranks that leave after their `delays`. Returns the failure reports that they have received.
std::string heard_when_leaving(const std::vector<std::chrono::milliseconds>& delays) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = static_cast<int>(delays.size());
  std::vector<Listener> listeners(delays.size());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto watchdog = start_watchdog(*store, {.rank = rank, .size = size}, listeners[rank]);
      std::this_thread::sleep_for(delays[rank]);
      watchdog->leave(false);
    });
  }
  for (auto& rank : ranks) rank.join();
  std::string heard;
  for (const auto& listener : listeners) heard += listener.heard();
  return heard;
}

// Many watchdogs run at once, so that threads are often preempted between two steps.
TEST(Watchdog, ExitOfRanksInAnyOrderIsNoFailure) {
  const OnOneCore guard;
  using std::chrono::milliseconds;
  const std::vector<std::vector<milliseconds>> orders = {
      {milliseconds(0), milliseconds(0), milliseconds(5), milliseconds(10)},
      {milliseconds(10), milliseconds(0), milliseconds(5), milliseconds(0)},
      {milliseconds(0), milliseconds(0), milliseconds(0), milliseconds(0)}};
  std::vector<std::string> heard(24);
  std::vector<std::thread> watches;
  for (size_t watch = 0; watch < heard.size(); ++watch) {
    watches.emplace_back([&, watch] {
      for (int round = 0; round < 10; ++round) heard[watch] += heard_when_leaving(orders[(watch + round) % 3]);
    });
  }
  for (auto& watch : watches) watch.join();
  for (const auto& text : heard) EXPECT_EQ(text, "");
}

// Gives one rank a port where no process listens, as if a firewall blocked it or only rank 0's host had the address.
class MisledStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  std::vector<uint8_t> get(const std::string& key) override {
    const auto said = PrefixStore::get(key);
    if (key != "watchdog") return said;
    const std::string text = "1" + std::string(said.begin() + text_begin(said), said.end());
    return {text.begin(), text.end()};
  }

 private:
  static std::ptrdiff_t text_begin(const std::vector<uint8_t>& said) {
    return std::ranges::find(said, ' ') - said.begin();
  }
};

TEST(Watchdog, NoRankIsWatchedWhenOneCannotReachRankZero) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::vector<Listener> listeners(4);
  std::vector<std::string> outcomes(4);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::PrefixStore>("w", shared);
      if (rank == 2) store = c10::make_intrusive<MisledStore>("w", shared);
      try {
        const auto watchdog =
            start_watchdog(*store, {.rank = rank, .size = 4, .timeout = std::chrono::seconds(8)}, listeners[rank]);
        outcomes[rank] = watchdog ? "watched" : "none";
      } catch (const std::exception& error) {
        outcomes[rank] = error.what();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, "none");
}

TEST(WatchdogMessages, RoundTripAndRefuseInvalidText) {
  const CallFailure failure{.group = 4'000'000'000, .sequence = UINT64_MAX, .text = "a \"b\"\n", .timed_out = true};
  EXPECT_EQ(to_text(parse_call_failure(to_text(failure), 3)), to_text(failure));
  const FailureReport report{.text = "rank 1 has ended", .culprit = 1, .is_consequence = true};
  EXPECT_EQ(to_text(parse_failure_report(to_text(report))), to_text(report));
  for (const std::string& rubbish :
       {std::string(), std::string("{}"), std::string("[1]"), std::string(100'000, '['),
        std::string(
            R"({"group": -1, "sequence": 1, "text": "", "timed_out": true, "culprit": -2, "consequence": false})"),
        std::string(R"({"group": 1, "sequence": 1, "text": [], "timed_out": 1, "culprit": 0, "consequence": 0})"),
        R"({"text": ")" + std::string(2 << 20, 'x') + R"(", "culprit": 0, "consequence": true})"}) {
    EXPECT_THROW(parse_call_failure(rubbish, 3), Error) << rubbish.substr(0, 60);
    EXPECT_THROW(parse_failure_report(rubbish), Error) << rubbish.substr(0, 60);
  }
}

}  // namespace
}  // namespace tessera::comm
