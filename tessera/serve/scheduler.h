// The engine on a thread of its own, and the answers that come out of it.
//
//   Scheduler scheduler(model, {.pages = pages}, limits);
//   const auto answer = scheduler.submit(request, tokenizer);
//   while (const auto piece = answer->next(200ms)) ...
//
// Thread-safe. An answer that nobody holds any more frees its sequence.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/text_stream.h"
#include "tessera/serve/limits.h"
#include "tessera/serve/requests.h"

namespace tessera::serve {

// The part of an answer that one token of a choice brought.
struct Piece {
  size_t choice = 0;
  std::string text{};              // may be empty: held back, or no text
  std::optional<int64_t> token{};  // absent where a choice ends without one: at the deadline, or with an error
  std::optional<TokenLogProbs> log_probs{};
  std::optional<Finish> finish{};
  std::string error{};                            // of kError
  std::vector<TokenLogProbs> prompt_log_probs{};  // of the first one, where they are wanted
};

class Answer {
 public:
  Answer(const text::Tokenizer& tokenizer, const CompletionRequest& request);
  // The next piece of any choice; nothing when none came in time. After one with `finish` there is none of that choice,
  // after kError none that counts.
  std::optional<Piece> next(std::chrono::milliseconds wait);
  void cancel();
  // No further token of that choice.
  void stop(size_t choice);
  // Ends all choices with the text that was made until now, as kLength: their last pieces come next. False, and no
  // piece, where no token was made. Cancels.
  bool cut_off();

 private:
  friend class Scheduler;
  bool take(size_t choice, const NewToken& made);  // on the engine's thread
  void end(const std::string& error);

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<Piece> pieces_;
  bool cancelled_ = false, has_tokens_ = false;
  std::vector<TextStream> streams_;
  std::vector<bool> ended_;  // choices of which no piece may follow
};

class Scheduler {
 public:
  // failed: what ends an engine whose model several ranks hold, on its thread; nothing is taken any more.
  Scheduler(std::shared_ptr<CausalLM> model, const EngineOptions& options, const Limits& limits,
            std::function<void(std::exception_ptr)> failed = {});
  // Cancels what is left.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // ApiError 503 where the queue is full.
  std::shared_ptr<Answer> submit(const CompletionRequest& request, const text::Tokenizer& tokenizer);
  EngineCounts counts() const;

 private:
  struct Arrival {
    GenerationRequest request;
    std::weak_ptr<Answer> answer;
  };
  void work();
  void take_arrivals(std::unique_lock<std::mutex>& lock);
  void drop_cancelled();
  void fail_all(const std::string& error);

  const Limits limits_;
  const std::function<void(std::exception_ptr)> failed_;           // of a model that is shared
  Engine engine_;                                                  // of the thread, as active_
  std::vector<std::pair<int64_t, std::weak_ptr<Answer>>> active_;  // by the sequence's number
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Arrival> arrivals_;
  EngineCounts counts_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::serve
