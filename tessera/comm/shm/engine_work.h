// A collective or message that an Engine carries, as c10d sees it.
//
//   work->wait(5s);        // throws what it failed with; after 5 s: that it timed out, which breaks its group off
//
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/shm/segment.h"

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
  bool ended_ = false;  // under the engine's lock, unlike completed_
};

// A work that has come to its end, with why it failed, or null.
struct Ended {
  c10::intrusive_ptr<EngineWork> work;
  std::exception_ptr failure;
};

}  // namespace tessera::comm::shm
