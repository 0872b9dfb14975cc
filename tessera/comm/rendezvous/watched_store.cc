#include "tessera/comm/rendezvous/watched_store.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/watch/monitor.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kSlice{250};  // interval between checks whether a rank has failed

}  // namespace

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<uint8_t>> WatchedStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

void WatchedStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

// Waits in slices and looks for a failed rank after each. An error that the wrapped store throws before the end of the
// slice is not a time-out, but a failure of the store itself.
void WatchedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const auto begin = Clock::now();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - begin);
    const auto slice = std::clamp(left, std::chrono::milliseconds(1), kSlice);
    try {
      return PrefixStore::wait(keys, slice);
    } catch (const std::exception&) {
      if (const auto report = monitor_->failure_report()) throw_failure_report(*report, "");
      if (Clock::now() - begin < slice) throw;
    }
    if (Clock::now() < deadline) continue;
    const auto missing = std::ranges::find_if(keys, [&](const std::string& key) { return !check({key}); });
    if (missing == keys.end()) return;
    raise(ErrorKind::kComm, "[comm.store] no value for {} within {} s", *missing, timeout.count() / 1000);
  }
}

}  // namespace tessera::comm
