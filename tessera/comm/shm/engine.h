// Makes progress on all that one rank has in flight in a group: its collectives, in the order in which they were
// started, and its messages.
//
//   auto work = c10::make_intrusive<CollectiveWork>(engine, ...);
//   engine->start(work);      // writes the first slot if the group is idle, so peers need not wait for this rank
//   work->wait();             // drives it here, and everything else, unless another thread does
//
// One thread at a time drives: it steps the front collective and the messages, none of which ever waits, and sleeps at
// the rank's bell when nothing moves. A thread that waits for a work drives until it has ended. While nobody waits, a
// worker thread, made at first need, is enlisted at the bell whenever peers may come to need this rank; so everything
// that was started goes on while the caller computes. What only the caller needs is left for its wait() or
// isCompleted(). The lock is never held while data is copied. The first failure breaks the group off, and everything
// that was or is started fails with its reason. Thread-safe.
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
  // tensors: kept alive until the end. results: what result() gives.
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
  // Until `work` has ended, well or not; its call fails at `deadline`, or its own if that is sooner.
  void wait(EngineWork& work, Clock::time_point deadline);
  // Whether it has ended. Never waits.
  bool poll(EngineWork& work);
  void break_off(const std::string& reason) noexcept { channel_->break_off(reason); }
  Channel& channel() { return *channel_; }
  // Ends all collectives that were started, fails messages that have not ended, and ends the worker. No calls may
  // follow or be under way.
  void shut_down();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Waiter;

  // With the lock held; what drives has `driven_` set.
  void begin_driving();
  void begin_work(Lock& lock);
  template <class Until>
  bool drive(Lock& lock, bool sleeps, const Until& until);
  template <class Look>
  void drive_once(Lock& lock, const Look& look);
  void end_driving(Lock& lock);
  void make_worker();
  void take_in();
  void settle();
  bool wanted() const;
  void work();

  // By whoever drives, without the lock.
  bool step();
  bool step_collective();
  bool step_messages();
  bool check(bool look_for_deaths);
  void check_late_messages();
  void fail_collective(std::exception_ptr failure);
  void fail_messages(std::exception_ptr failure);
  void break_off_for(const std::exception_ptr& failure);
  bool is_idle() const { return !front_ && messages_.is_idle(); }
  bool has_news() const { return news_ || !ended_.empty(); }

  std::shared_ptr<Channel> channel_;

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<CollectiveWork>> queue_;  // behind the front one
  std::vector<c10::intrusive_ptr<MessageWork>> posted_;   // messages that the driver has not seen
  int waiting_ = 0;                                       // threads at changed_
  bool driven_ = false, enlisted_ = false, stop_ = false;
  bool dozes_ = false;         // the worker sleeps without looking up now and then
  bool woke_in_vain_ = false;  // the worker, while another thread was about to leave the driving to it
  std::thread worker_;

  std::atomic<bool> news_{false};  // for the driver: something was started, or a deadline has changed

  // Of whoever drives; else of who holds the lock.
  c10::intrusive_ptr<CollectiveWork> front_;
  bool front_is_posted_ = false;
  Messages messages_;
  Clock::time_point deadline_{};  // of the collectives
  Clock::time_point looked_{};    // for what no bell announces, where nobody sleeps
  std::vector<Ended> ended_;      // to be told
};

}  // namespace tessera::comm::shm
