// The Platform of rounds.h for production: atomics in memory that processes share, and futexes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#include "tessera/comm/shm/rounds.h"

namespace tessera::comm::shm {

struct Native {
  using Word32 = std::atomic<uint32_t>;
  using Word64 = std::atomic<uint64_t>;
  static_assert(Word32::is_always_lock_free && Word64::is_always_lock_free);

  static void wake_all(Word32& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
  // Sleeps until wake_all(), for `limit` at most. Returns at once when word != seen.
  static void sleep(Word32& word, uint32_t seen, std::chrono::nanoseconds limit) {
    const timespec time{.tv_sec = limit.count() / 1'000'000'000, .tv_nsec = limit.count() % 1'000'000'000};
    ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
};

}  // namespace tessera::comm::shm
