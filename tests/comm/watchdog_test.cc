// How the watch over a world ends when nothing is wrong.
#include "tessera/comm/watch/watchdog.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::comm {
namespace {

class Listener final : public PeerListener {
 public:
  FlightRecord where(uint32_t, uint64_t) override { return {}; }
  void hear(const Verdict& verdict) override {
    const std::lock_guard lock(mutex_);
    heard_ += verdict.text;
  }
  std::string heard() const {
    const std::lock_guard lock(mutex_);
    return heard_;
  }

 private:
  mutable std::mutex mutex_;
  std::string heard_;
};

// All threads on one core: whoever posts a message is then often put aside for the thread that it wakes.
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

// Ranks of a watch that leave in the order of `delays`; what any of them heard.
std::string heard_when_leaving(const std::vector<std::chrono::milliseconds>& delays) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = static_cast<int>(delays.size());
  std::vector<Listener> listeners(delays.size());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto watchdog = Watchdog::start(*store, {.rank = rank, .size = size}, listeners[rank]);
      std::this_thread::sleep_for(delays[rank]);
      watchdog->leave(false);
    });
  }
  for (auto& rank : ranks) rank.join();
  std::string heard;
  for (const auto& listener : listeners) heard += listener.heard();
  return heard;
}

// Many at once, so that threads are often put aside between two steps.
TEST(Watchdog, RanksThatLeaveInWhateverOrderAreNoDeath) {
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

}  // namespace
}  // namespace tessera::comm
