#include "tessera/serve/scheduler.h"

#include <c10/core/DeviceGuard.h>
#include <omp.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/serve/api_error.h"

namespace tessera::serve {
namespace {

constexpr std::chrono::seconds kIdle{10};  // interval of Engine::keep_alive(), within the time-out of other ranks

}  // namespace

AnswerQueue::AnswerQueue(const text::Tokenizer& tokenizer, const CompletionRequest& request)
    : ended_(request.choices.size()) {
  for (const auto& choice : request.choices) streams_.emplace_back(tokenizer, request.stop, choice.options.stop_tokens);
}

std::optional<AnswerPiece> AnswerQueue::next(std::chrono::milliseconds wait) {
  std::unique_lock lock(mutex_);
  if (!piece_added_.wait_for(lock, wait, [this] { return !pieces_.empty(); })) return std::nullopt;
  auto piece = std::move(pieces_.front());
  pieces_.pop_front();
  return piece;
}

void AnswerQueue::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

void AnswerQueue::stop(size_t choice) {
  const std::lock_guard lock(mutex_);
  ended_[choice] = true;
}

// The connection's thread calls cut_off(), and the engine's thread calls take(). cut_off() sets ended_ while it holds
// mutex_, so take() adds no piece after the last piece of a choice, which cut_off() adds.
bool AnswerQueue::cut_off() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (!has_tokens_) return false;
  for (size_t choice = 0; choice < streams_.size(); ++choice) {
    if (ended_[choice]) continue;
    ended_[choice] = true;
    pieces_.push_back({.choice = choice, .text = streams_[choice].finish(), .finish = Finish::kLength});
  }
  piece_added_.notify_all();
  return true;
}

// The engine calls take() for each new token. TextStream holds back text that may become a stop string. The piece that
// ends a choice has all text that was still held back.
bool AnswerQueue::take(size_t choice, const NewToken& made) {
  if (made.error) log_error("[serve] {}", made.error->what());
  const std::lock_guard lock(mutex_);
  if (cancelled_ || ended_[choice]) return false;
  auto& stream = streams_[choice];
  AnswerPiece piece{
      .choice = choice, .log_probs = made.log_probs, .finish = made.finish, .prompt_log_probs = made.prompt_log_probs};
  if (made.error) {
    piece.error = made.error->what();
  } else {
    piece.token = made.token;
    piece.text = stream.push(made.token);
    has_tokens_ = true;
  }
  if (piece.finish) piece.text += stream.finish();
  if (stream.stopped()) piece.finish = Finish::kStop;
  ended_[choice] = piece.finish.has_value();
  pieces_.push_back(std::move(piece));
  piece_added_.notify_all();
  return !ended_[choice];
}

void AnswerQueue::end(const std::string& error) {
  const std::lock_guard lock(mutex_);
  pieces_.push_back({.finish = Finish::kError, .error = error});
  piece_added_.notify_all();
}

Scheduler::Scheduler(std::shared_ptr<CausalLM> model, const EngineOptions& options, const Limits& limits,
                     std::function<void(std::exception_ptr)> failed)
    : limits_(limits), failed_(std::move(failed)), engine_(std::move(model), options) {
  {
    const c10::DeviceGuard here(engine_.device());
    engine_.allocate_pages();  // a lack of memory is then an error of the start, not of the first request
  }
  thread_ = std::thread([this] { work(); });
  // Ends the OpenMP workers of this thread, which has loaded the model. Together with the workers of the engine's
  // thread there would be more workers than cores; libgomp would then let workers sleep between loops instead of
  // spinning, and a token would take twice as long.
  omp_pause_resource_all(omp_pause_soft);
}

Scheduler::~Scheduler() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

// The callback of a sequence has a weak pointer to the AnswerQueue, so the engine does not keep an AnswerQueue alive
// that the connection has dropped.
std::shared_ptr<AnswerQueue> Scheduler::submit(const CompletionRequest& request, const text::Tokenizer& tokenizer) {
  auto answer = std::make_shared<AnswerQueue>(tokenizer, request);
  {
    const std::lock_guard lock(mutex_);
    const int64_t ahead = counts_.running + counts_.waiting + static_cast<int64_t>(queued_requests_.size());
    const auto wanted = static_cast<int64_t>(request.choices.size());
    if (ending_ || ahead + wanted > limits_.sequences + limits_.queue) {
      throw ApiError(
          503, fmt::format("The server is busy: {} requests are being answered or waiting. Try again later.", ahead),
          "overloaded");
    }
    const std::weak_ptr<AnswerQueue> held = answer;
    for (size_t choice = 0; choice < request.choices.size(); ++choice) {
      const auto& of = request.choices[choice];
      queued_requests_.push_back({{.prompt = of.prompt,
                                   .options = of.options,
                                   .log_probs = request.log_probs,
                                   .prompt_log_probs = request.echo,
                                   .on_token =
                                       [held, choice](const NewToken& made) {
                                         const auto to = held.lock();
                                         return to && to->take(choice, made);
                                       }},
                                  held});
    }
  }
  wake_.notify_all();
  return answer;
}

EngineCounts Scheduler::counts() const {
  const std::lock_guard lock(mutex_);
  auto counts = counts_;
  counts.waiting += static_cast<int64_t>(queued_requests_.size());
  return counts;
}

// Passes the queued requests to the engine. `lock` holds `mutex_`, which is released during Engine::add(), so that
// submit() and counts() do not wait for Engine::add().
void Scheduler::start_queued_requests(std::unique_lock<std::mutex>& lock) {
  while (!queued_requests_.empty()) {
    auto queued = std::move(queued_requests_.front());
    queued_requests_.pop_front();
    const auto answer = queued.answer.lock();
    if (!answer) continue;
    lock.unlock();
    try {
      active_.emplace_back(engine_.add(std::move(queued.request)), answer);
    } catch (const std::exception& error) {
      answer->end(as_error(error).what());
    }
    lock.lock();
    counts_ = engine_.counts();
  }
}

// Cancels the sequences whose answer was cancelled or destroyed. Sequences that wait or compute their prompt call no
// callback, so they are checked here between two steps.
void Scheduler::drop_cancelled() {
  std::erase_if(active_, [this](const auto& active) {
    if (const auto answer = active.second.lock()) {
      const std::lock_guard lock(answer->mutex_);
      if (!answer->cancelled_) return false;
    }
    engine_.cancel(active.first);
    return true;
  });
}

void Scheduler::fail_all(const std::string& error) {
  for (const auto& [id, held] : active_) {
    engine_.cancel(id);
    if (const auto answer = held.lock()) answer->end(error);
  }
  active_.clear();
}

// The loop of the engine's thread: accept requests, drop cancelled ones, compute one step. mutex_ is not held during a
// step. Without work the thread waits for a request, and wakes every kIdle to call keep_alive().
void Scheduler::work() {
  const c10::DeviceGuard here(engine_.device());  // a new thread starts with device 0 as its current device
  std::unique_lock lock(mutex_);
  while (!ending_) {
    start_queued_requests(lock);
    lock.unlock();
    bool busy = false;
    try {
      drop_cancelled();
      busy = engine_.step();
      if (!busy) engine_.keep_alive();
    } catch (const std::exception& error) {
      log_error("[serve] {}", error.what());
      fail_all(as_error(error).what());
      if (failed_) {
        failed_(std::current_exception());
        lock.lock();
        ending_ = true;
        break;
      }
    }
    lock.lock();
    counts_ = engine_.counts();
    if (!busy) {
      active_.clear();
      wake_.wait_for(lock, kIdle, [this] { return ending_ || !queued_requests_.empty(); });
    }
  }
  lock.unlock();
  fail_all("The server is shutting down.");
}

}  // namespace tessera::serve
