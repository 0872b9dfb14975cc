// The time that a thread has spent in collectives: starting them, moving data and waiting for peers.
//
//   const double before = comm::communication_seconds();
//   ...
//   const double spent = comm::communication_seconds() - before;
//
// The time of collectives that run in the background while the thread computes is not counted. No communication.
#pragma once

#include <chrono>

namespace tessera::comm {

// Seconds that the calling thread has spent in collectives since the thread began.
double communication_seconds();

// Adds the time from its construction to its destruction to communication_seconds() of the calling thread. Of nested
// timers only the outermost counts.
class CommunicationTimer {
 public:
  CommunicationTimer();
  ~CommunicationTimer();
  CommunicationTimer(const CommunicationTimer&) = delete;
  CommunicationTimer& operator=(const CommunicationTimer&) = delete;

 private:
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace tessera::comm
