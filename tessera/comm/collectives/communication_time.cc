#include "tessera/comm/collectives/communication_time.h"

namespace tessera::comm {
namespace {

// Number of CommunicationTimers that exist on this thread. When timers are nested, only the outermost timer adds its
// time, so that no time is counted twice.
thread_local int timers_in_force = 0;
thread_local std::chrono::steady_clock::duration spent_communicating{};

}  // namespace

double communication_seconds() { return std::chrono::duration<double>(spent_communicating).count(); }

CommunicationTimer::CommunicationTimer() {
  if (timers_in_force++ == 0) begin_ = std::chrono::steady_clock::now();
}

CommunicationTimer::~CommunicationTimer() {
  if (--timers_in_force == 0) spent_communicating += std::chrono::steady_clock::now() - begin_;
}

}  // namespace tessera::comm
