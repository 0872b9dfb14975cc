// A coroutine: a function that is suspended where it would have to wait, and resumed later.
//
//   StepCoroutine run(Channel& channel) {
//     write(channel);
//     co_await arrive(channel);        // a std::suspend_always: suspended here
//     read(channel);
//   }
//   StepCoroutine steps = run(channel);      // does nothing yet
//   while (!steps.resume_once()) ...         // runs to the next co_await; true: it has ended. Rethrows its exceptions
//
// Not thread-safe; different threads may call resume_once() one after the other.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace tessera::comm::shm {

class StepCoroutine {
 public:
  struct promise_type {
    StepCoroutine get_return_object() { return StepCoroutine(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { failure = std::current_exception(); }
    std::exception_ptr failure;
  };

  StepCoroutine() = default;
  ~StepCoroutine() {
    if (handle_) handle_.destroy();
  }
  StepCoroutine(StepCoroutine&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  StepCoroutine& operator=(StepCoroutine&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  explicit operator bool() const { return static_cast<bool>(handle_); }
  bool resume_once() {
    handle_.resume();
    if (handle_.promise().failure) std::rethrow_exception(handle_.promise().failure);
    return handle_.done();
  }

 private:
  using Handle = std::coroutine_handle<promise_type>;
  explicit StepCoroutine(Handle handle) : handle_(handle) {}
  Handle handle_ = nullptr;
};

}  // namespace tessera::comm::shm
