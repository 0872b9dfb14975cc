#include "tessera/comm/shm/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

namespace tessera::comm::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// Spin time before the futex wait. A sleep and a wake-up cost at least 5 us on each side, and a piece of a large
// message takes about 50 us, so a thread that waits for a work spins longer than that. The worker spins less, to leave
// the core to computation.
constexpr microseconds kCallerSpin{100}, kWorkerSpin{10};
// With more ranks than cores, another rank may need this core to make progress, so a thread that drives the engine
// yields instead of spinning. It stops yielding after kYields yields and then sleeps (the worker stops driving
// instead). A yield that takes longer than kLongYield means that other processes want the core, too. The thread then
// stops yielding at once, because a thread that sleeps gets the core back sooner than a thread that yields.
constexpr int kYields = 20;
constexpr microseconds kLongYield{50};
// A peer's death or a deadline does not wake the futex. So a thread that drives the engine, and the worker while it is
// registered at its bell, sleep for at most kSlice at a time and then check for both.
constexpr nanoseconds kSlice = milliseconds(100);
constexpr int kIdleSlices = 10;  // number of idle slices after which the worker sleeps without a bound

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// ---- works ----

EngineWork::EngineWork(std::shared_ptr<Engine> engine, c10d::OpType type, milliseconds timeout)
    : Work(engine->channel().rank(), type), engine_(std::move(engine)), deadline_(Clock::now() + timeout) {}

bool EngineWork::isCompleted() { return engine_->poll(*this); }

bool EngineWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

bool EngineWork::wait(milliseconds timeout) {
  const bool limited = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
  engine_->wait(*this, limited ? Clock::now() + timeout : Clock::time_point::max());
  const std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void EngineWork::abort() { engine_->abort_group(engine_->channel().name_of(rank_) + " aborted the group"); }

CollectiveWork::CollectiveWork(std::shared_ptr<Engine> engine, c10d::OpType type, uint64_t sequence,
                               std::unique_ptr<Operation> operation, milliseconds timeout,
                               std::vector<at::Tensor> tensors, std::vector<at::Tensor> results)
    : EngineWork(std::move(engine), type, timeout),
      sequence_(sequence),
      operation_(std::move(operation)),
      tensors_(std::move(tensors)),
      results_(std::move(results)) {}

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

// ---- driving ----

void Engine::begin_driving() {
  driven_ = true;
  if (!worker_registered_) return;
  channel_->bells().worker.unregister_sleeper();
  worker_registered_ = false;
}

// Whether a thread of this rank must watch a bell of this rank and advance the works that were started. False if there
// are no such works, or only a posted collective for which Operation::may_delay_peers() is false.
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

// The waiting strategy of a driving thread (a Waiter of rounds.h): spins, or yields when ranks outnumber cores, and
// then sleeps in slices, with a check for deaths and deadlines after each. The worker (`sleeps` false) does not sleep
// here but gives up driving after its spin time.
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

// Begins to drive the engine, calls look() once, and ends driving. look() must not wait. `lock` holds `mutex_` of the
// engine; it is released while look() runs.
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

// ---- steps ----

// Makes one step of the started collective that comes first (front_) and of the messages. Returns whether one of the
// two made progress or failed.
bool Engine::step() {
  const bool collective = front_ && step_collective();
  const bool message = !messages_.is_idle() && step_messages();
  return collective || message;
}

bool Engine::step_collective() {
  try {
    if (!std::exchange(front_is_posted_, true)) {
      if (channel_->is_aborted()) channel_->throw_abort_reason();
      front_->operation_->post(*channel_);
      return true;
    }
    const auto progress = front_->operation_->step(*channel_);
    if (progress != Operation::Progress::kDone) return progress == Operation::Progress::kSome;
    front_->operation_.reset();
    front_->tensors_.clear();
    ended_.push_back({std::move(front_), nullptr});
  } catch (...) {
    fail_collective(std::current_exception());
  }
  return true;
}

bool Engine::step_messages() {
  try {
    if (messages_.move(ended_)) return true;
    if (channel_->is_aborted()) channel_->throw_abort_reason();
    return false;
  } catch (...) {
    fail_messages(std::current_exception());
  }
  return true;
}

// Checks for events that ring no bell: dead ranks, ranks that have left, and deadlines. A rank may have completed its
// side of a collective before it ended or left. Therefore deaths are read first, and one step is made afterwards: if
// this step moves nothing, no later step will, and the works fail. Returns whether something moved or ended.
bool Engine::check(bool look_for_deaths) {
  if (is_idle()) return false;
  const std::string dead = look_for_deaths ? channel_->dead_rank_text() : "";
  const auto left = channel_->left_by_rank();
  if (step()) return true;
  const auto now = Clock::now();
  if (front_) {
    try {
      if (!dead.empty()) channel_->fail(dead);
      const std::string gone = channel_->left_rank_name();
      if (!gone.empty()) channel_->fail(gone + " has left the group");
      if (now >= deadline_) {
        const std::string missing = channel_->missing_rank_names();
        channel_->fail(fmt::format("timed out: {} did not arrive", missing.empty() ? "a rank" : missing),
                       AbortReason::kTimedOut);
      }
    } catch (...) {
      fail_collective(std::current_exception());
    }
  }
  if (!messages_.is_idle()) {
    try {
      if (!dead.empty()) channel_->fail(dead);
      messages_.check(now, left, false);
    } catch (...) {
      fail_messages(std::current_exception());
    }
  }
  return !ended_.empty();
}

// Checks the deadlines of messages that have not begun, at most every kSlice. drive() calls this function while other
// works move data: a busy engine never sleeps, so Engine::check() is not called then.
void Engine::check_late_messages() {
  const auto now = Clock::now();
  if (messages_.is_idle() || now - last_check_ < kSlice) return;
  last_check_ = now;
  try {
    messages_.check(now, std::vector<bool>(channel_->size()), true);
  } catch (...) {
    fail_messages(std::current_exception());
  }
}

// Aborts the group with the text of `failure`, then waits until no thread of this process reads this rank's memory in
// place any more (Channel::await_readers). Only after that may the tensors of failed works be freed.
void Engine::abort_group_for(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    channel_->abort_group(error);
  } catch (...) {
    channel_->abort_group("an unknown error");
  }
  channel_->await_readers();
}

// operation_ is destroyed before abort_group_for(): its suspended coroutine may hold an InPlaceRead, and
// abort_group_for() waits until no thread of this process holds an InPlaceRead.
void Engine::fail_collective(std::exception_ptr failure) {
  front_->operation_.reset();
  abort_group_for(failure);
  channel_->unmap_all_buffers();
  front_->tensors_.clear();
  ended_.push_back({std::move(front_), std::move(failure)});
}

void Engine::fail_messages(std::exception_ptr failure) {
  abort_group_for(failure);
  messages_.fail_all(failure, ended_);
}

}  // namespace tessera::comm::shm
