// Continuing many sequences at once: they join and leave between steps, and share the pages of what they begin with.
//
//   Engine engine(model, {.pages = Engine::pages_for(model->config(), 4 * 8192)});
//   engine.add({.prompt = ids, .options = options, .on_token = [&](const NewToken& made) { ...; return true; }});
//   while (engine.step()) {}
//
// A step computes one token of each sequence that is generating and blocks of the prompts of others in one forward. Of
// a model in rows (row_model.h) a sequence gets the same tokens whatever runs beside it. When pages run out the
// sequence that came last gives its pages back and is computed again later, which changes nothing but the time it
// takes.
//
// A sequence with a constraint chooses its token when its mask is there. A mask that takes more than
// EngineOptions::mask_steps, or more than its share of four times as many where more than four want one, waits with its
// sequence: all that wait share so many steps of the work in each step of the engine, while the other sequences go on,
// and others come into their places. One thread at a time.
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
#include "tessera/models/generation/choice.h"
#include "tessera/models/generation/generate.h"
#include "tessera/models/generation/pages.h"
#include "tessera/models/generation/step_rows.h"
#include "tessera/nn/attention/paged_cache.h"

namespace tessera {

enum class Finish { kStop, kLength, kError };

struct NewToken {
  int64_t token = 0;
  std::optional<Finish> finish{};  // of the last one: a stop token or the callback's word is kStop
  std::optional<TokenLogProbs> log_probs{};
  std::optional<Error> error{};  // of kError, which brings no token
  // With the first token, where they are wanted: of the prompt's second token and all behind it.
  std::vector<TokenLogProbs> prompt_log_probs{};
};

struct GenerationRequest {
  std::vector<int64_t> prompt{};
  GenerationOptions options{};
  std::optional<int64_t> log_probs{};  // wanted: of the token, and so many of the likeliest
  bool prompt_log_probs = false;       // of the prompt's tokens likewise, whose logits are then all computed
  // Sees each token as it is made, from step(); false ends the sequence. It must not call the engine.
  std::function<bool(const NewToken& made)> on_token{};
};

struct EngineOptions {
  int64_t pages = 0;
  int64_t max_sequences = 64;  // computed together, beside those that wait for masks; more wait
  int64_t prompt_block = 256;  // tokens of prompts in one step
  // Of the work on the mask of a sequence at once, where at most four want one, and on all masks that wait: some
  // milliseconds (text/grammar/grammar_masks.h).
  int64_t mask_steps = 20'000;
  // Of the ranks that hold the model together; this one is the leader, the others run follow_steps (shared_steps.h).
  std::shared_ptr<comm::Group> group = nullptr;
};

struct EngineCounts {
  int64_t running = 0, waiting = 0;
  int64_t waiting_for_masks = 0;  // of those that are running
  int64_t pages_in_use = 0;
  int64_t prompt_tokens = 0, shared_tokens = 0;  // computed so far, and found in pages of others
  int64_t new_tokens = 0, steps = 0, preempted = 0;
};

class Engine {
 public:
  // Error kConfig unless a sequence of one page and one token fits. With a group it, its steps and its end are
  // COLLECTIVE.
  Engine(const std::shared_ptr<CausalLM>& model, const EngineOptions& options);
  // Of a model that others hold: `forward` computes its rows, on that device.
  Engine(ModelConfig config, RowsForward forward, at::Device device, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Makes the memory of all pages by computing one token that belongs to no sequence; else the first step makes it.
  // Before the first step. Error kMemory where the allocator refuses. With a group it is COLLECTIVE, together with
  // follow_steps.
  void allocate_pages();
  // Its number. Error kConfig: a prompt that generate would not take, wrong options, or one that no number of free
  // pages could hold.
  int64_t add(GenerationRequest request);
  // Ends a sequence without a further call of its callback; nothing where it has ended.
  void cancel(int64_t id);
  // False when there is nothing to do. Where the model fails, the sequences are computed one by one, and those with
  // which it fails again end with kError. With a group the error is thrown, and ends the engine for all ranks.
  bool step();
  // Tells the other ranks to wait on; to be called within their time-out while there is nothing to do.
  void keep_alive();
  EngineCounts counts() const;
  const ModelConfig& config() const { return config_; }
  at::Device device() const { return device_; }  // the model's

  // Pages that hold so many tokens.
  static int64_t pages_for(int64_t tokens) { return (tokens + kernels::kPageTokens - 1) / kernels::kPageTokens; }
  // Bytes of a page, in that dtype.
  static int64_t page_bytes(const ModelConfig& config, int64_t element_bytes);

 private:
  struct Sequence;
  struct Step;
  struct Reading;
  using Sequences = std::list<std::unique_ptr<Sequence>>;

  int64_t shareable_tokens(const Sequence& sequence) const;
  void admit();
  void share_prefix(Sequence& sequence);
  bool give_pages(Sequence& sequence, int64_t tokens);
  void preempt(Sequence& sequence);
  Step plan();
  at::Tensor run(const Step& step);
  std::optional<Error> try_step(const Step& step);  // the model's
  void publish(Sequence& sequence);
  void read(Reading& reading, std::span<const float> logits, int64_t mask_steps) const;
  void finish_step(const Step& step, const at::Tensor& logits);
  // Goes on with the choice of a sequence for at most so many steps of its mask; true when the token is made.
  static bool choose(Sequence& sequence, std::span<const float> logits, int64_t mask_steps);
  void deliver(Sequence& sequence);
  void advance_waiting_mask();

  ModelConfig config_;
  RowsForward forward_;
  EngineOptions options_;
  Pages pages_;
  nn::PageStore store_;
  at::Device device_;
  bool failed_ = false;  // with a group: it is of no more use
  Sequences running_;    // in the order in which they came
  std::deque<std::unique_ptr<Sequence>> waiting_;
  EngineCounts counts_;
  int64_t next_id_ = 1;
  int64_t last_advanced_ = 0;       // the sequence whose mask was worked on last
  int64_t steps_without_rows_ = 0;  // in which all sequences waited
};

}  // namespace tessera
