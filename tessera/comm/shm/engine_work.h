// The c10d::Work of a collective or message that an Engine advances.
//
//   work->wait(5s);        // throws the error of the work; after 5 s TimedOut, which aborts the group
//
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/shm/shared_memory.h"

namespace tessera::comm::shm {

class Engine;

class EngineWork : public c10d::Work {
 public:
  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;

 protected:
  EngineWork(std::shared_ptr<Engine> engine, c10d::OpType type, std::chrono::milliseconds timeout);
  Clock::time_point deadline() const { return deadline_.load(); }

 private:
  friend class Engine;
  friend class Messages;
  std::shared_ptr<Engine> engine_;
  std::atomic<Clock::time_point> deadline_;
  bool ended_ = false;  // guarded by the engine's lock, unlike Work::completed_
};

// A work that has ended. `failure` is its error, or null when the work succeeded.
struct EndedWork {
  c10::intrusive_ptr<EngineWork> work;
  std::exception_ptr failure;
};

}  // namespace tessera::comm::shm
