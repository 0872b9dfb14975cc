#include "tessera/comm/shm/alarm.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm::shm {

Alarm::Alarm() : timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)) {
  TESSERA_CHECK(
      timer_.get() >= 0, ErrorKind::kIo,
      "[comm.shm] cannot make a timer: {}. Raise the limit of open files (ulimit -n), or set comm.backend=gloo.",
      std::strerror(errno));
}

void Alarm::set(std::chrono::nanoseconds after) noexcept {
  const auto count = std::max<int64_t>(1, after.count());
  const itimerspec when{.it_interval = {},
                        .it_value = {.tv_sec = count / 1'000'000'000, .tv_nsec = count % 1'000'000'000}};
  ::timerfd_settime(timer_.get(), 0, &when, nullptr);
}

void Alarm::call_off() noexcept {
  const itimerspec never{};
  ::timerfd_settime(timer_.get(), 0, &never, nullptr);
}

void Alarm::wait() noexcept {
  uint64_t times = 0;
  while (::read(timer_.get(), &times, sizeof(times)) < 0 && errno == EINTR) {
  }
}

}  // namespace tessera::comm::shm
