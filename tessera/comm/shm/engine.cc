#include "tessera/comm/shm/engine.h"

#include <pthread.h>

#include <algorithm>

namespace tessera::comm::shm {
namespace {

// A caller that waits within this time runs its call itself, which spares both a change of threads.
constexpr auto kGrace = std::chrono::microseconds(30);

}  // namespace

CollectiveWork::CollectiveWork(std::shared_ptr<Engine> engine, c10d::OpType type, uint64_t sequence,
                               std::unique_ptr<Operation> operation, std::chrono::milliseconds timeout,
                               std::vector<at::Tensor> tensors, std::vector<at::Tensor> results)
    : Work(engine->channel().rank(), type),
      engine_(std::move(engine)),
      sequence_(sequence),
      operation_(std::move(operation)),
      deadline_(Clock::now() + timeout),
      tensors_(std::move(tensors)),
      results_(std::move(results)),
      small_(operation_->is_small(engine_->channel())) {}

CollectiveWork::~CollectiveWork() = default;

bool CollectiveWork::isCompleted() { return engine_->poll(*this); }

bool CollectiveWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (timeout != kNoTimeout && timeout != c10d::kUnsetTimeout) {
    const std::lock_guard lock(mutex_);
    deadline_ = std::min(deadline_, Clock::now() + timeout);
  }
  engine_->wait(*this);
  const std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void CollectiveWork::abort() { engine_->break_off(engine_->channel().name_of(rank_) + " broke off"); }

Engine::~Engine() { shut_down(); }

void Engine::shut_down() {
  {
    Lock lock(mutex_);
    while (!queue_.empty()) {
      if (busy_) {
        changed_.wait(lock);
      } else {
        run_front(lock, Patience::kWorker);
      }
    }
    stop_ = true;
  }
  alarm_.set({});
  if (worker_.joinable()) worker_.join();
  channel_->forget_all();
}

void Engine::start(const c10::intrusive_ptr<CollectiveWork>& work) {
  Lock lock(mutex_);
  if (!busy_ && !queue_.empty() && queue_.front()->small_ && channel_->complete()) {
    run_front(lock, Patience::kCaller);
  }
  queue_.push_back(work);
  if (!busy_ && queue_.size() == 1) post_front();
  if (!worker_wanted()) return;
  if (!worker_.joinable()) worker_ = std::thread([this] { this->work(); });
  if (!busy_) alarm_.set(kGrace);
}

void Engine::wait(CollectiveWork& work) {
  Lock lock(mutex_);
  while (!work.ended_) {
    if (busy_) {
      changed_.wait(lock);
    } else {
      run_front(lock, Patience::kCaller);
    }
  }
}

bool Engine::poll(CollectiveWork& work) {
  Lock lock(mutex_);
  if (!work.ended_ && !busy_ && queue_.front().get() == &work && work.small_ &&
      (channel_->complete() || channel_->is_broken())) {
    run_front(lock, Patience::kCaller);
  }
  return work.ended_;
}

bool Engine::worker_wanted() const { return !queue_.empty() && (queue_.size() > 1 || !queue_.front()->small_); }

// With the mutex held: posting never blocks.
void Engine::post_front() {
  while (!queue_.empty()) {
    CollectiveWork& work = *queue_.front();
    try {
      if (channel_->is_broken()) channel_->throw_broken();
      work.operation_->post(*channel_);
      return;
    } catch (...) {
      end_front(std::current_exception());
    }
  }
}

void Engine::run_front(Lock& lock, Patience patience) {
  busy_ = true;
  const auto work = queue_.front();
  Clock::time_point deadline;
  {
    const std::lock_guard guard(work->mutex_);
    deadline = work->deadline_;
  }
  lock.unlock();
  if (patience == Patience::kCaller && !work->small_) alarm_.call_off();
  std::exception_ptr failure;
  try {
    work->operation_->finish(*channel_, patience, deadline);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    channel_->break_off(error);
    channel_->await_readers();
    channel_->forget_all();
  }
  lock.lock();
  busy_ = false;
  end_front(failure);
  post_front();
  if (patience == Patience::kCaller && worker_wanted()) alarm_.set(kGrace);
  changed_.notify_all();
}

void Engine::end_front(std::exception_ptr failure) {
  const auto work = queue_.front();
  queue_.pop_front();
  work->ended_ = true;
  work->operation_.reset();
  work->tensors_.clear();
  work->finish(failure);
}

void Engine::work() {
  ::pthread_setname_np(::pthread_self(), "tessera shm");
  for (;;) {
    alarm_.wait();
    Lock lock(mutex_);
    // Whoever is busy sets the alarm again if he leaves work behind.
    while (!stop_ && !busy_ && worker_wanted()) run_front(lock, Patience::kWorker);
    if (stop_) return;
  }
}

}  // namespace tessera::comm::shm
