// The time that a thread has spent in collectives: starting them, moving data and waiting for peers.
//
//   const double before = comm::communication_seconds();
//   ...
//   const double spent = comm::communication_seconds() - before;
//
// What goes on in the background while the thread computes is not in it. No communication.
#pragma once

#include <chrono>

namespace tessera::comm {

// Of this thread, since it began.
double communication_seconds();

// Counts until it is destroyed; one inside another counts once.
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
