// SIGTERM and SIGUSR1 while a run trains: the first asks it to save and end, a second ends it at once.
//
//   const StopSignals signals;
//   while (!StopSignals::requested()) train_step();
//
// A launcher passes on what it is sent, and whoever stops a job often signals its ranks as well: what comes once from
// the launcher and once from elsewhere within a second is one request.
#pragma once

#include <signal.h>

namespace tessera::train {

// Takes the signals over for its lifetime, one object at a time in a process; then the handlers of before come back.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Whether one has come since the last object was made. Any thread.
  static bool requested();

 private:
  struct sigaction before_[2];
};

}  // namespace tessera::train
