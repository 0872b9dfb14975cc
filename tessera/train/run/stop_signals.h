// Handles SIGTERM and SIGUSR1 during training: the first signal asks the run to save and end; a second signal ends the
// process at once.
//
//   const StopSignals signals;
//   while (!StopSignals::requested()) train_step();
//
// A job scheduler often signals the launcher and the ranks, and the launcher forwards its signal to the ranks. So one
// signal from the launcher (the parent process) and one from another sender within a second count as one request.
#pragma once

#include <signal.h>

namespace tessera::train {

// Installs the handlers for its lifetime and restores the previous ones afterwards. One object at a time per process.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Whether a signal has arrived since the latest StopSignals object was constructed. Thread-safe.
  static bool requested();

 private:
  struct sigaction before_[2];
};

}  // namespace tessera::train
