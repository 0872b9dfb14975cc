#include "tessera/comm/rendezvous/thread_ranks.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/watch/thread_failure_reporter.h"

namespace tessera::comm {
namespace {

// An in-memory store whose waits throw PeerFailed after abort(), which a failing rank calls: the keys that other
// ranks wait for would never be set.
class ThreadStore final : public c10d::HashStore {
 public:
  void abort() {
    const std::lock_guard lock(m_);
    aborted_ = true;
    cv_.notify_all();
  }

  using HashStore::wait;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    std::unique_lock lock(m_);
    const auto ready = [&] { return aborted_ || checkLocked(lock, keys); };
    if (timeout == kNoTimeout) {
      cv_.wait(lock, ready);
    } else if (!cv_.wait_for(lock, timeout, ready)) {
      raise(ErrorKind::kComm, "[comm.store] no value for {} within {} ms", keys.empty() ? "" : keys[0],
            timeout.count());
    }
    if (aborted_) throw PeerFailed("aborted because another rank failed");
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, timeout_);
    return HashStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys, timeout_);
    return HashStore::multiGet(keys);
  }

 private:
  bool aborted_ = false;
};

}  // namespace

// When a rank throws, all waits of the other ranks must end: those in the store by abort(), those in collectives by
// abort() of every world. The other ranks then usually throw PeerFailed; such an error is rethrown only when no rank
// has thrown another one.
void run_thread_ranks(int size, const std::function<void(std::shared_ptr<World>)>& body, WorldOptions options) {
  TESSERA_CHECK(size >= 1, ErrorKind::kConfig, "[comm.run_thread_ranks] {} ranks: wanted at least 1", size);
  const auto store = c10::make_intrusive<ThreadStore>();
  options.threads = std::make_shared<ThreadRankState>();
  std::vector<std::shared_ptr<World>>
      worlds;  // kept until all ranks have ended: a peer may still read this rank's memory
  for (int rank = 0; rank < size; ++rank) {
    worlds.push_back(World::create(
        {.rank = rank, .size = size, .local_rank = rank, .local_size = size, .source = "threads"}, store, options));
  }
  const int threads_before = at::get_num_threads();
  const int threads_each = std::max(1, threads_before / size);
  std::mutex mutex;
  std::exception_ptr cause, consequence;
  const auto fail = [&](std::exception_ptr& slot) {
    {
      const std::lock_guard lock(mutex);
      if (!slot) slot = std::current_exception();
    }
    store->abort();
    for (const auto& world : worlds) world->abort();
  };
  const auto run_rank = [&](int rank) {
    at::set_num_threads(threads_each);
    try {
      body(worlds[rank]);
    } catch (const PeerFailed&) {
      fail(consequence);
    } catch (...) {
      fail(cause);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  at::set_num_threads(threads_before);  // new threads inherit the value that any thread has set last
  if (cause || consequence) std::rethrow_exception(cause ? cause : consequence);
}

}  // namespace tessera::comm
