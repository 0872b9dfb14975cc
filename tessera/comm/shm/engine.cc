#include "tessera/comm/shm/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

namespace tessera::comm::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

// How long a thread spins before it sleeps on the futex. A sleep and its wake-up cost at least 5 us on each side, and a
// piece of a large message takes about 50 us. A thread in Work::wait() therefore spins for more than 50 us, so that it
// does not sleep between two pieces. The engine's worker thread spins for a shorter time, to leave the core to
// computation.
constexpr microseconds kCallerSpin{100}, kWorkerSpin{10};
// With more ranks than cores, another rank may need this core to make progress, so a thread that drives the engine
// yields instead of spinning. It stops yielding after kYields yields and then sleeps (the worker stops driving
// instead). A yield that takes longer than kLongYield means that other processes want the core, too. The thread then
// stops yielding at once, because a thread that sleeps gets the core back sooner than a thread that yields.
constexpr int kYields = 20;
constexpr microseconds kLongYield{50};
constexpr int kIdleSlices = 10;  // number of idle slices after which the worker sleeps without a bound

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// ---- calls of the user's threads ----

Engine::~Engine() { shut_down(); }

void Engine::start(const c10::intrusive_ptr<CollectiveWork>& work) {
  Lock lock(mutex_);
  queue_.push_back(work);
  advance_started_work(lock);
}

void Engine::start(const c10::intrusive_ptr<MessageWork>& work) {
  Lock lock(mutex_);
  posted_.push_back(work);
  advance_started_work(lock);
}

// Makes one step of the engine after a work was started: messages move by one chunk, and a started collective writes
// and publishes its first slot if no other collective is under way. A second step follows only when peers may already
// wait for this rank. If another thread drives the engine (engine.h), no step is made here, and that thread is notified
// instead.
void Engine::advance_started_work(Lock& lock) {
  if (driven_) {
    has_new_work_ = true;
    channel_->bells().driver.ring();
    return;
  }
  drive_once(lock, [this] {
    step();
    if (!is_idle() && (!front_ || front_->operation_->may_delay_peers())) step();
  });
}

void Engine::wait(EngineWork& work, Clock::time_point deadline) {
  Lock lock(mutex_);
  if (deadline < work.deadline()) {
    work.deadline_ = deadline;
    has_new_work_ = true;
    if (driven_) channel_->bells().driver.ring();
  }
  while (!work.ended_) {
    if (driven_) {
      ++waiting_;
      changed_.wait(lock);
      --waiting_;
    } else {
      drive(lock, true, [&] { return work.ended_; });
    }
  }
  if (driven_ || worker_registered_ || !needs_driver()) return;
  // Works are left, but no thread drives the engine. end_driving() of the last driving thread did not register the
  // worker thread at the worker's bell, because a thread was waiting (`waiting_`) and was expected to drive next. This
  // thread may be the one: its own work has ended, so it does not drive. It calls end_driving(), which registers the
  // worker thread if no other thread waits.
  begin_driving();
  end_driving(lock);
}

bool Engine::poll(EngineWork& work) {
  Lock lock(mutex_);
  if (work.ended_ || driven_) return work.ended_;
  drive_once(lock, [this] {
    if (step() || Clock::now() - last_check_ <= kSlice) return;
    last_check_ = Clock::now();
    check(true);
  });
  return work.ended_;
}

void Engine::shut_down() {
  Lock lock(mutex_);
  const auto collectives_ended = [this] { return !front_ && queue_.empty(); };
  while (driven_ || !collectives_ended()) {
    if (driven_) {
      ++waiting_;
      changed_.wait(lock);
      --waiting_;
    } else {
      drive(lock, true, collectives_ended);
    }
  }
  take_started_works();
  if (!messages_.is_idle()) {
    fail_messages(std::make_exception_ptr(PeerFailed(channel_->name_of(channel_->rank()) + " has left the group")));
    complete_ended_works();
  }
  stop_ = true;
  channel_->bells().worker.ring_unconditionally();
  lock.unlock();
  if (worker_.joinable()) worker_.join();
  channel_->unmap_all_buffers();
}

// ---- driving the engine (see the top of engine.h) ----

void Engine::begin_driving() {
  driven_ = true;
  if (!worker_registered_) return;
  channel_->bells().worker.unregister_sleeper();
  worker_registered_ = false;
}

// Whether some thread of this rank must now advance the works that were started and, when none can move, sleep on a
// futex of this rank that its peers wake (a bell, see EventCount in rounds.h). False if there are no such works, or
// only a collective that was posted (Operation::post()) and for which Operation::may_delay_peers() is false.
bool Engine::needs_driver() const {
  return !queue_.empty() || !posted_.empty() || !messages_.is_idle() ||
         (front_ && (!front_is_posted_ || front_->operation_->may_delay_peers()));
}

// Moves newly started works to the members that the driving thread uses without the lock (messages_, front_), and
// computes the earliest deadline of the collectives. `has_new_work_` is cleared before that: a work that is started
// later sets it again.
void Engine::take_started_works() {
  has_new_work_ = false;
  for (auto& message : posted_) messages_.add(std::move(message));
  posted_.clear();
  if (!front_ && !queue_.empty()) {
    front_ = std::move(queue_.front());
    front_is_posted_ = false;
    queue_.pop_front();
  }
  deadline_ = front_ ? front_->deadline() : Clock::time_point::max();
  for (const auto& work : queue_) deadline_ = std::min(deadline_, work->deadline());
}

// Marks ended works as completed and notifies the threads that wait.
void Engine::complete_ended_works() {
  if (ended_.empty()) return;
  for (auto& [work, failure] : ended_) {
    work->ended_ = true;
    work->finish(failure);
  }
  ended_.clear();
  if (waiting_ > 0) changed_.notify_all();
}

// How a thread that drives the engine waits (a Waiter of rounds.h). The thread first spins, or yields when ranks
// outnumber cores. Then it sleeps for at most kSlice at a time. Before each sleep it checks for deadlines and for ranks
// that have left, and after a full kSlice also for dead ranks. The worker thread (`sleeps` false) does not sleep here:
// it stops driving the engine after its spin time.
struct Engine::DriverWait {
  Engine& engine;
  bool sleeps;
  Clock::time_point began{};
  int spin_count = 0;
  bool gave_up = false;

  bool spin() {
    if (engine.channel_->oversubscribed()) {
      if (++spin_count > kYields) return give_up();
      const auto before = Clock::now();
      ::sched_yield();
      return Clock::now() - before < kLongYield || give_up();
    }
    pause();
    if (++spin_count % 16 != 0) return true;
    const auto now = Clock::now();
    if (began == Clock::time_point{}) began = now;
    return now - began < (sleeps ? kCallerSpin : kWorkerSpin) || give_up();
  }
  bool give_up() {
    gave_up = !sleeps;
    return gave_up;  // true: EventCount::wait() calls settled() once more, which then returns true
  }
  void sleep(Native::Word32& word, uint32_t seen) {
    if (engine.check(false)) return;
    const auto before = Clock::now();
    const auto deadline = std::min(engine.deadline_, engine.messages_.deadline());
    const nanoseconds slice = std::clamp<nanoseconds>(deadline - before, nanoseconds(1), kSlice);
    Native::sleep(word, seen, slice);
    if (Clock::now() - before >= slice) engine.check(true);
  }
};

// Drives the engine until `until` returns true. Without `sleeps` (the worker thread), drive() also returns when nothing
// has moved for the worker's spin time. Returns whether any step moved something. `lock` is released while works are
// stepped; meanwhile `driven_` keeps other threads from driving the engine.
template <class Until>
bool Engine::drive(Lock& lock, bool sleeps, const Until& until) {
  begin_driving();
  bool moved = false;
  for (bool stuck = false; !stuck;) {
    take_started_works();
    lock.unlock();
    bool steps = step();
    if (!steps && !has_new_or_ended_work()) {
      DriverWait waiter{.engine = *this, .sleeps = sleeps};
      channel_->bells().driver.wait(waiter, [&] {
        steps = step();
        return steps || has_new_or_ended_work() || waiter.gave_up;
      });
    }
    if (steps) check_late_messages();
    lock.lock();
    moved = moved || steps;
    stuck = !steps && !has_new_or_ended_work();
    complete_ended_works();
    if (until()) break;
    if (sleeps) stuck = false;
  }
  end_driving(lock);
  return moved;
}

// Makes this thread the one that drives the engine (see the top of engine.h), calls look() once, and then stops
// driving. look() makes steps of the engine and must not wait. `lock` holds the engine's `mutex_`, which is released
// while look() runs.
template <class Look>
void Engine::drive_once(Lock& lock, const Look& look) {
  begin_driving();
  take_started_works();
  lock.unlock();
  look();
  lock.lock();
  complete_ended_works();
  end_driving(lock);
}

// The driving thread stops driving, without losing a wake-up. If no other thread waits for a work but peers may need
// this rank, end_driving() registers the worker thread at the worker's bell and then makes one more step. The step sees
// what a peer did before the registration; a peer that acts after the registration rings the bell. end_driving() itself
// rings the worker's bell in these cases: there is work already; the worker sleeps without a bound
// (`sleeps_unbounded_`) and would miss its periodic checks; the worker was woken in between, saw `driven_` and slept
// again (`woke_while_driven_`).
void Engine::end_driving(Lock& lock) {
  take_started_works();
  if (front_ && !front_is_posted_) {  // peers wait for the first slot
    lock.unlock();
    step_collective();
    lock.lock();
    complete_ended_works();
  }
  if (waiting_ == 0 && needs_driver()) {
    make_worker();
    EventCount<Native>& bell = channel_->bells().worker;
    bell.register_sleeper();
    worker_registered_ = true;
    woke_while_driven_ = false;
    lock.unlock();
    const bool moved = step();
    lock.lock();
    complete_ended_works();
    if (!needs_driver()) {
      bell.unregister_sleeper();
      worker_registered_ = false;
    } else if (moved || has_new_work_ || sleeps_unbounded_ || woke_while_driven_ || (!front_ && !queue_.empty())) {
      bell.ring_unconditionally();
    }
  }
  driven_ = false;
  if (waiting_ > 0) changed_.notify_all();  // one of the waiting threads will drive
}

void Engine::make_worker() {
  if (worker_.joinable()) return;
  try {
    worker_ = std::thread([this] { work(); });
  } catch (...) {
    driven_ = false;
    throw;
  }
}

// The loop of the worker thread. The worker sleeps at its bell, an EventCount: it reads the bell's count, looks at the
// state, and then sleeps only while the count is unchanged, so a ring after the look ends the sleep at once. While the
// worker is registered as a sleeper at the bell (worker_registered_), it wakes at least every kSlice and checks for
// dead ranks and deadlines. After more than kIdleSlices slices in which it was not registered, it sleeps until the bell
// is rung.
void Engine::work() {
  ::pthread_setname_np(::pthread_self(), "tessera shm");
  EventCount<Native>& bell = channel_->bells().worker;
  Lock lock(mutex_);
  for (int idle_slices = 0;;) {
    const uint32_t seen = bell.count.load();
    if (stop_) return;
    if (driven_) {
      woke_while_driven_ = true;
    } else if (worker_registered_) {
      if (drive(lock, false, [this] { return !needs_driver(); })) idle_slices = 0;
    }
    if (worker_registered_) idle_slices = 0;
    sleeps_unbounded_ = idle_slices > kIdleSlices;
    const auto slice = sleeps_unbounded_ ? std::chrono::hours(1) : kSlice;
    lock.unlock();
    const auto before = Clock::now();
    Native::sleep(bell.count, seen, slice);
    const bool over = Clock::now() - before >= kSlice;
    lock.lock();
    sleeps_unbounded_ = false;
    idle_slices = over ? idle_slices + 1 : 0;
    if (over && !driven_ && worker_registered_) drive_once(lock, [this] { check(true); });
  }
}

}  // namespace tessera::comm::shm
