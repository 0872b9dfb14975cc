// Wakes one thread after a while, unless it is called off before: setting and calling off cost a system call each and
// no change of threads.
//
//   Alarm alarm;
//   alarm.set(30us);                   // any thread; the last one counts
//   alarm.call_off();
//   alarm.wait();                      // one thread: until it goes off
//
// Thread-safe. Error kIo when the process has no descriptor left.
#pragma once

#include <chrono>

#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

class Alarm {
 public:
  Alarm();
  void set(std::chrono::nanoseconds after) noexcept;  // not positive: at once
  void call_off() noexcept;
  void wait() noexcept;

 private:
  Descriptor timer_;
};

}  // namespace tessera::comm::shm
