// Runs the collectives of one rank's group in the order in which they were started, in whichever thread is at hand.
//
//   auto work = c10::make_intrusive<CollectiveWork>(engine, ...);
//   engine->start(work);      // writes the first slot if the group is idle, so peers need not wait for this rank
//   work->wait();             // finishes it here, unless the worker thread has
//
// Collectives that are waited for at once so never change threads. Large ones that are not, and those that queue up,
// are run by a worker thread, made at first need, so that they go on while the caller computes. The first failure
// breaks the group off, and everything that was or is started fails with its reason. Thread-safe.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "tessera/comm/shm/alarm.h"
#include "tessera/comm/shm/operation.h"

namespace tessera::comm::shm {

class Engine;

class CollectiveWork final : public c10d::Work {
 public:
  // tensors: kept alive until the end. results: what result() gives.
  CollectiveWork(std::shared_ptr<Engine> engine, c10d::OpType type, uint64_t sequence,
                 std::unique_ptr<Operation> operation, std::chrono::milliseconds timeout,
                 std::vector<at::Tensor> tensors, std::vector<at::Tensor> results);
  ~CollectiveWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return results_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void abort() override;

 private:
  friend class Engine;
  std::shared_ptr<Engine> engine_;
  uint64_t sequence_;
  std::unique_ptr<Operation> operation_;
  Clock::time_point deadline_;
  std::vector<at::Tensor> tensors_, results_;
  bool small_ = false, ended_ = false;  // ended_: under the engine's mutex, unlike completed_
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void start(const c10::intrusive_ptr<CollectiveWork>& work);
  // Until `work` has ended, well or not.
  void wait(CollectiveWork& work);
  bool poll(CollectiveWork& work);
  void break_off(const std::string& reason) noexcept { channel_->break_off(reason); }
  Channel& channel() { return *channel_; }
  // Ends everything that was started, and the worker. No calls may follow or be under way.
  void shut_down();

 private:
  using Lock = std::unique_lock<std::mutex>;
  void post_front();
  void run_front(Lock& lock, Patience patience);
  void end_front(std::exception_ptr failure);
  bool worker_wanted() const;
  void work();

  std::shared_ptr<Channel> channel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // The front one is posted whenever nobody is busy with it.
  std::deque<c10::intrusive_ptr<CollectiveWork>> queue_;
  bool busy_ = false, stop_ = false;
  std::thread worker_;
  Alarm alarm_;  // for the worker
};

}  // namespace tessera::comm::shm
