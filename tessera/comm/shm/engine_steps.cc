// The functions of Engine that only the driving thread calls: steps of works, checks for deaths and deadlines,
// failures.
#include <fmt/format.h>

#include "tessera/comm/shm/engine.h"

namespace tessera::comm::shm {

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
