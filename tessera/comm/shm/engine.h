// The progress engine of one rank in a shared-memory group. It advances the rank's started collectives, in the
// order of their start, and its messages.
//
//   auto work = c10::make_intrusive<CollectiveWork>(engine, ...);
//   engine->start(work);      // writes the first slot if the group is idle, so peers need not wait for this rank
//   work->wait();             // advances this and all other works here, unless another thread does
//
// One thread at a time "drives" the engine: it steps the collective that was started first and has not ended, and
// the messages. These steps never block. When nothing can move, the thread sleeps at the rank's bell. A thread that
// waits for a work drives until that work has ended. While no thread waits, a worker thread is woken by the bell
// when peers may need this rank, so started works advance while the caller computes. The worker is made when it is
// first needed. Steps that no peer waits for are left to the caller's wait() or isCompleted(). The engine's mutex
// is never held while data is copied. The first failure aborts the group, and all started and later works fail with
// its reason. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "tessera/comm/shm/messages.h"
#include "tessera/comm/shm/operation.h"

namespace tessera::comm::shm {

class CollectiveWork final : public EngineWork {
 public:
  // tensors: kept alive until the work has ended. results: returned by result().
  CollectiveWork(std::shared_ptr<Engine> engine, c10d::OpType type, uint64_t sequence,
                 std::unique_ptr<Operation> operation, std::chrono::milliseconds timeout,
                 std::vector<at::Tensor> tensors, std::vector<at::Tensor> results);
  std::vector<at::Tensor> result() override { return results_; }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  friend class Engine;
  uint64_t sequence_;
  std::unique_ptr<Operation> operation_;
  std::vector<at::Tensor> tensors_, results_;
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Channel> channel) : channel_(std::move(channel)), messages_(*channel_) {}
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void start(const c10::intrusive_ptr<CollectiveWork>& work);
  void start(const c10::intrusive_ptr<MessageWork>& work);
  // Waits until `work` has ended, with or without an error. The work fails at `deadline`, or at its own deadline if
  // that is earlier.
  void wait(EngineWork& work, Clock::time_point deadline);
  // Makes one step of the engine, unless another thread drives the engine (see the top of this file). Returns whether
  // `work` has ended. Never waits.
  bool poll(EngineWork& work);
  void abort_group(const std::string& reason) noexcept { channel_->abort_group(reason); }
  Channel& channel() { return *channel_; }
  // Waits until all started collectives have ended, fails messages that have not ended, and ends the worker thread. No
  // other call may follow or be under way.
  void shut_down();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct DriverWait;

  // Threads of a rank sleep on a futex (a bell, see EventCount), and peers wake them through it. Neither the death of a
  // peer nor a deadline wakes the futex. So two threads sleep for at most kSlice at a time and then check for dead
  // peers and for deadlines: the thread that drives the engine, and the worker thread while it is registered as a
  // sleeper at the worker's bell.
  static constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(100);

  // The caller of these functions, except work(), must hold `mutex_`. `driven_` is true from begin_driving() to
  // end_driving().
  void begin_driving();
  void advance_started_work(Lock& lock);
  template <class Until>
  bool drive(Lock& lock, bool sleeps, const Until& until);
  template <class Look>
  void drive_once(Lock& lock, const Look& look);
  void end_driving(Lock& lock);
  void make_worker();
  void take_started_works();
  void complete_ended_works();
  bool needs_driver() const;
  void work();

  // Only the thread that drives the engine calls these functions. They do not need `mutex_`. step() is called without
  // it, so that the mutex is not held while data is copied.
  bool step();
  bool step_collective();
  bool step_messages();
  bool check(bool look_for_deaths);
  void check_late_messages();
  void fail_collective(std::exception_ptr failure);
  void fail_messages(std::exception_ptr failure);
  void abort_group_for(const std::exception_ptr& failure);
  bool is_idle() const { return !front_ && messages_.is_idle(); }
  bool has_new_or_ended_work() const { return has_new_work_ || !ended_.empty(); }

  std::shared_ptr<Channel> channel_;

  std::mutex mutex_;  // guards the members up to worker_
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<CollectiveWork>> queue_;  // started collectives behind the front one
  std::vector<c10::intrusive_ptr<MessageWork>> posted_;   // started messages that the driver has not taken yet
  int waiting_ = 0;                                       // threads that wait at changed_
  // `driven_`: a thread drives the engine (see the top of this file). `worker_registered_`: the worker thread is
  // registered as a sleeper of its bell. `stop_`: the worker thread must end.
  bool driven_ = false, worker_registered_ = false, stop_ = false;
  bool sleeps_unbounded_ = false;   // the worker sleeps without the periodic checks, and must be woken to resume them
  bool woke_while_driven_ = false;  // the worker woke and slept again while another thread was still driving
  std::thread worker_;

  std::atomic<bool> has_new_work_{false};  // tells the driver that a work was started or a deadline has changed

  // The members from here on are used by the thread that drives the engine, without `mutex_`. While no thread drives,
  // they are guarded by `mutex_`.
  c10::intrusive_ptr<CollectiveWork> front_;  // the collective under way
  bool front_is_posted_ = false;              // its first slot has been written
  Messages messages_;
  Clock::time_point deadline_{};    // earliest deadline of the collectives
  Clock::time_point last_check_{};  // last check for deaths and deadlines by a thread that does not sleep
  std::vector<EndedWork> ended_;    // ended works whose waiters have not been notified yet
};

}  // namespace tessera::comm::shm
