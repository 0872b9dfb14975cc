// Runs the generation engine on its own thread, and passes the generated tokens to the threads of the connections.
//
//   Scheduler scheduler(model, {.pages = pages}, limits);
//   const auto answer = scheduler.submit(request, tokenizer);
//   while (const auto piece = answer->next(200ms)) ...
//
// Thread-safe. When the last shared_ptr of an AnswerQueue is destroyed, its sequences are cancelled.
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

// The part of an answer that comes from one generated token of a choice.
struct AnswerPiece {
  size_t choice = 0;
  std::string text{};              // empty when the text is held back, or when the token has no text
  std::optional<int64_t> token{};  // nullopt when a choice ends without a token: at the deadline, or with an error
  std::optional<TokenLogProbs> log_probs{};
  std::optional<Finish> finish{};
  std::string error{};                            // the message, with Finish::kError
  std::vector<TokenLogProbs> prompt_log_probs{};  // in the first piece of a choice, when they are requested
};

// The answer to one request: a queue of pieces between the engine's thread, which adds them, and the thread of the
// connection, which calls next().
class AnswerQueue {
 public:
  AnswerQueue(const text::Tokenizer& tokenizer, const CompletionRequest& request);
  // The next piece of any choice; nullopt when none came within `wait`. A piece with `finish` is the last one of its
  // choice. After Finish::kError all further pieces must be ignored.
  std::optional<AnswerPiece> next(std::chrono::milliseconds wait);
  void cancel();
  // Ends the sequence of this choice.
  void stop(size_t choice);
  // Cancels the sequences and ends all choices with the text generated so far: next() returns a last piece with
  // Finish::kLength for each. Returns false, without pieces, when no token has been generated.
  bool cut_off();

 private:
  friend class Scheduler;
  bool take(size_t choice, const NewToken& made);  // engine's thread: adds a piece; false ends the sequence
  void end(const std::string& error);

  std::mutex mutex_;
  std::condition_variable piece_added_;
  std::deque<AnswerPiece> pieces_;
  bool cancelled_ = false, has_tokens_ = false;
  std::vector<TextStream> streams_;
  std::vector<bool> ended_;  // by choice: no further piece may be added
};

class Scheduler {
 public:
  // `failed` is meant for a model that several ranks hold. If `failed` is given, an error of the engine ends the
  // scheduler: `failed` is called with the error on the engine's thread, and no further request is accepted. If
  // `failed` is empty, an error of the engine only makes the current requests fail.
  Scheduler(std::shared_ptr<CausalLM> model, const EngineOptions& options, const Limits& limits,
            std::function<void(std::exception_ptr)> failed = {});
  // Cancels all requests.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Queues one sequence per choice. ApiError 503 when the queue is full.
  std::shared_ptr<AnswerQueue> submit(const CompletionRequest& request, const text::Tokenizer& tokenizer);
  EngineCounts counts() const;

 private:
  struct QueuedRequest {
    GenerationRequest request;
    std::weak_ptr<AnswerQueue> answer;
  };
  void work();
  void start_queued_requests(std::unique_lock<std::mutex>& lock);
  void drop_cancelled();
  void fail_all(const std::string& error);

  const Limits limits_;
  const std::function<void(std::exception_ptr)> failed_;
  Engine engine_;  // used only by thread_ after the constructor
  // Sequence ids with their answers; used only by thread_.
  std::vector<std::pair<int64_t, std::weak_ptr<AnswerQueue>>> active_;
  mutable std::mutex mutex_;  // protects the members below
  std::condition_variable wake_;
  std::deque<QueuedRequest> queued_requests_;
  EngineCounts counts_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::serve
