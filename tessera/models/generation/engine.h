// Continues many sequences at once. Sequences join and leave between steps, and share the KV-cache pages of common
// prefixes.
//
//   Engine engine(model, {.pages = Engine::pages_for(model->config(), 4 * 8192)});
//   engine.add({.prompt = ids, .options = options, .on_token = [&](const NewToken& token) { ...; return true; }});
//   while (engine.step()) {}
//
// A step runs one forward pass over one token of each generating sequence and over blocks of the prompts of other
// sequences. With a row model (row_model.h), a sequence gets the same tokens whatever other sequences run. When no page
// is free, the newest sequence is preempted: it returns its pages and is computed again later. Preemption changes only
// the time, never the tokens.
//
// A sequence with a constraint chooses its token when its token mask is ready. A mask may take
// EngineOptions::mask_steps steps of work in the step that starts it; when more than four masks start, they share four
// times this number. A mask that takes longer waits together with its sequence. All waiting masks share mask_steps
// steps of work per engine step. Meanwhile the other sequences continue, and new sequences may start in place of the
// waiting ones. Not thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/group/group.h"
#include "tessera/models/generation/generate.h"
#include "tessera/models/generation/page_pool.h"
#include "tessera/models/generation/sampling.h"
#include "tessera/models/generation/step_rows.h"
#include "tessera/nn/attention/paged_cache.h"

namespace tessera {

enum class Finish { kStop, kLength, kError };

struct NewToken {
  int64_t token = 0;
  // Set for the last token of a sequence. kStop: a stop token, or the constraint is complete. kLength: the maximal
  // length is reached. kError: see `error`.
  std::optional<Finish> finish{};
  std::optional<TokenLogProbs> log_probs{};
  std::optional<Error> error{};  // set with kError, which has no token
  // Set with the first new token if the request has prompt_log_probs: the log-probs of all tokens of the prompt except
  // the first.
  std::vector<TokenLogProbs> prompt_log_probs{};
};

struct GenerationRequest {
  std::vector<int64_t> prompt{};
  GenerationOptions options{};
  std::optional<int64_t> log_probs{};  // log-probs of the token, and of this many most likely tokens
  bool prompt_log_probs = false;       // also for the prompt's tokens; all their logits are then computed
  // Called from step() with each new token. If it returns false, the sequence ends. It must not call functions of the
  // engine.
  std::function<bool(const NewToken& new_token)> on_token{};
};

struct EngineOptions {
  int64_t pages = 0;
  // Largest number of running sequences, not counting those that wait for token masks. Further sequences wait until one
  // ends.
  int64_t max_sequences = 64;
  int64_t prompt_block = 256;  // prompt tokens per step
  // Limit of the work on token masks in one engine step. It counts the steps of text/grammar/grammar_masks.h; the
  // default takes some milliseconds. If at most four masks start in an engine step, each may take mask_steps; more
  // masks share four times this number. In addition one of the waiting masks may take mask_steps.
  int64_t mask_steps = 20'000;
  // The ranks that share the model. This rank is the leader; the other ranks call run_engine_follower
  // (engine_follower.h).
  std::shared_ptr<comm::Group> group = nullptr;
};

struct EngineCounts {
  int64_t running = 0, waiting = 0;
  int64_t waiting_for_masks = 0;  // part of `running`
  int64_t pages_in_use = 0;
  int64_t prompt_tokens = 0, shared_tokens = 0;  // computed tokens, and tokens found in pages of other sequences
  int64_t new_tokens = 0, steps = 0, preempted = 0;
};

class Engine {
 public:
  // Error kConfig unless all numbers in `options` are at least 1. With a group, the constructor, step() and the
  // destructor are COLLECTIVE, together with run_engine_follower on the other ranks.
  Engine(const std::shared_ptr<CausalLM>& model, const EngineOptions& options);
  // For a model that has no CausalLM object for all layers on this rank, as with pipeline stages. `forward` computes
  // the logits of each step (step_rows.h). `device` is the device of the model.
  Engine(ModelConfig config, RowsForward forward, at::Device device, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Allocates the memory of all pages, by computing one token that belongs to no sequence; otherwise the first step
  // allocates it. Call it before the first step. Error kMemory when the allocation fails. With a group it is
  // COLLECTIVE, together with run_engine_follower.
  void allocate_pages();
  // Adds a sequence and returns its id. Error kConfig: a prompt that generate() refuses, invalid options, or a sequence
  // that does not fit into all pages together.
  int64_t add(GenerationRequest request);
  // Ends a sequence without a further call of its callback. Does nothing when the sequence has ended.
  void cancel(int64_t id);
  // Runs one step; returns false when there is nothing to do. When the model throws, the sequences are computed one by
  // one, and each sequence for which it throws again ends with kError. With a group the error is thrown, and the engine
  // ends for all ranks.
  bool step();
  // Broadcasts a message so that the other ranks continue to wait without a time-out. While step() is not called, call
  // keep_alive() at intervals shorter than the group's time-out. Does nothing without a group.
  void keep_alive();
  EngineCounts counts() const;
  const ModelConfig& config() const { return config_; }
  at::Device device() const { return device_; }  // of the model

  // Returns the number of pages that hold this many tokens.
  static int64_t pages_for(int64_t tokens) { return (tokens + kernels::kPageTokens - 1) / kernels::kPageTokens; }
  // Returns the bytes of a page over all layers. `element_bytes` is the size of the cache's dtype.
  static int64_t page_bytes(const ModelConfig& config, int64_t element_bytes);

 private:
  struct Sequence;
  struct EngineStep;
  struct LogitsRow;
  using Sequences = std::list<std::unique_ptr<Sequence>>;

  int64_t shareable_tokens(const Sequence& sequence) const;
  void start_waiting();
  void reuse_prefix_pages(Sequence& sequence);
  bool reserve_pages(Sequence& sequence, int64_t tokens);
  void preempt(Sequence& sequence);
  EngineStep plan_step();
  at::Tensor run_forward(const EngineStep& step);
  std::optional<Error> try_step(const EngineStep& step);  // error of the model
  void publish_full_pages(Sequence& sequence);
  void use_logits_row(LogitsRow& logits_row, std::span<const float> logits, int64_t mask_steps) const;
  void finish_step(const EngineStep& step, const at::Tensor& logits);
  // Continues to choose the next token of `sequence`. If the request has a constraint, this needs masks of the tokens
  // that the constraint allows. The call does at most `mask_steps` steps of work on each mask and returns false when a
  // mask needs more. It returns true when a token is chosen or an error has occurred.
  static bool advance_choice(Sequence& sequence, std::span<const float> logits, int64_t mask_steps);
  void emit_token(Sequence& sequence);
  void advance_waiting_mask();

  ModelConfig config_;
  RowsForward forward_;
  EngineOptions options_;
  PagePool pages_;
  nn::PagedKVCache store_;
  at::Device device_;
  bool failed_ = false;  // with a group: after an error the engine cannot be used
  Sequences running_;    // in order of arrival
  std::deque<std::unique_ptr<Sequence>> waiting_;
  EngineCounts counts_;
  int64_t next_id_ = 1;
  int64_t last_advanced_ = 0;       // number of the sequence whose mask was advanced last
  int64_t steps_without_rows_ = 0;  // steps in which all sequences waited
};

}  // namespace tessera
