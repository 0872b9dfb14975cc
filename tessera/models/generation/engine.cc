#include "tessera/models/generation/engine.h"

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/models/generation/engine_follower.h"
#include "tessera/models/generation/engine_impl.h"

namespace tessera {

Engine::Engine(const std::shared_ptr<CausalLM>& model, const EngineOptions& options)
    : Engine(
          model->config(),
          [model, forward = rows_forward(*model)](nn::PagedKVCache& store, const StepRows& rows) {
            return forward(store, rows);
          },
          model->parameters().front().device(), options) {}

Engine::Engine(ModelConfig config, RowsForward forward, at::Device device, const EngineOptions& options)
    : config_(std::move(config)),
      forward_(std::move(forward)),
      options_(options),
      pages_(options.pages),
      store_(config_.num_hidden_layers, options.pages),
      device_(device) {
  TESSERA_CHECK(
      options.pages >= 1 && options.max_sequences >= 1 && options.prompt_block >= 1 && options.mask_steps >= 1,
      ErrorKind::kConfig,
      "[models.generation] {} pages, {} sequences, blocks of {}, {} steps for masks: wanted at least 1 of each",
      options.pages, options.max_sequences, options.prompt_block, options.mask_steps);
  if (options_.group) broadcast_begin(*options_.group, options_.pages);
}

Engine::~Engine() {
  // After a failure broadcast_end() is not called, because the other ranks have already returned from
  // run_engine_follower. An error of broadcast_end() is only logged, because a destructor must not throw.
  if (!options_.group || failed_) return;
  try {
    broadcast_end(*options_.group);
  } catch (const std::exception& error) {
    log_error("[models.generation] {}", error.what());
  }
}

void Engine::allocate_pages() {
  const at::NoGradGuard no_grad;
  // Computing one token in page 0 makes store_ allocate all pages of all layers. Page 0 is not published, so no
  // sequence reuses the token's keys and values.
  const int32_t page = 0;
  const StepRows rows{.tokens = {0},
                      .positions = {0},
                      .sequences = {{.first_row = 0, .rows = 1, .first_position = 0, .pages = {&page, 1}}},
                      .logits_rows = {0}};
  const int64_t tokens = options_.pages * kernels::kPageTokens;
  try {
    if (options_.group) broadcast_rows(*options_.group, rows);
    forward_(store_, rows);
  } catch (const std::exception& error) {
    failed_ = options_.group != nullptr;
    const auto own = as_error(error);
    if (failed_ || own.kind() != ErrorKind::kMemory) throw;
    raise(ErrorKind::kMemory, "[models.generation] a cache of {} tokens: {}. Give fewer --cache-tokens.", tokens,
          own.what());
  }
}

void Engine::keep_alive() {
  if (options_.group && !failed_) broadcast_wait(*options_.group);
}

int64_t Engine::page_bytes(const ModelConfig& config, int64_t element_bytes) {
  return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * kernels::kPageTokens *
         element_bytes;
}

int64_t Engine::add(GenerationRequest request) {
  auto sequence = std::make_unique<Sequence>();
  sequence->max_tokens = generation_capacity(config_, request.prompt, request.options);
  // The keys and values of the last token are never read, so they need no page.
  TESSERA_CHECK(
      pages_for(sequence->max_tokens - 1) <= pages_.count(), ErrorKind::kConfig,
      "[models.generation] a prompt of {} tokens and up to {} more do not fit into a cache of {} tokens. Set a "
      "larger --cache-tokens, or ask for fewer tokens.",
      request.prompt.size(), sequence->max_tokens - static_cast<int64_t>(request.prompt.size()),
      pages_.count() * kernels::kPageTokens);
  sequence->id = next_id_++;
  sequence->tokens = request.prompt;
  sequence->request = std::move(request);
  sequence->scores.resize(static_cast<size_t>(sequence->to_score()));
  waiting_.push_back(std::move(sequence));
  return waiting_.back()->id;
}

void Engine::cancel(int64_t id) {
  const auto has_id = [&](const auto& sequence) { return sequence->id == id; };
  std::erase_if(waiting_, has_id);
  const auto found = std::ranges::find_if(running_, has_id);
  if (found == running_.end()) return;
  preempt(**found);
  running_.erase(found);
}

// Releases all pages of a sequence. The last pages are released, and so reused, first, because other sequences most
// likely share the first pages. The caller removes the sequence from running_.
void Engine::preempt(Sequence& sequence) {
  for (auto page = sequence.pages.rbegin(); page != sequence.pages.rend(); ++page) pages_.release(*page);
  sequence.pages.clear();
  sequence.computed_tokens = sequence.published_pages = 0;
  sequence.prefix = PagePool::kEmptyPrefix;
}

// Moves sequences from waiting_ to running_, up to max_sequences. Running sequences that wait for a token mask do not
// count towards max_sequences.
void Engine::start_waiting() {
  auto computing = std::ranges::count_if(running_, [](const auto& one) { return !one->pending_token; });
  for (; !waiting_.empty() && computing < options_.max_sequences; ++computing) {
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// Returns the number of tokens, from the start of the sequence, whose keys are equal in every sequence that starts with
// these tokens. With dynamic rope, the keys of a call with more than max_position_embeddings tokens depend on the
// number of tokens, so they are not shared.
int64_t Engine::shareable_tokens(const Sequence& sequence) const {
  const auto tokens = static_cast<int64_t>(sequence.tokens.size());
  if (!config_.has_dynamic_rope()) return tokens;
  const bool is_long = static_cast<int64_t>(sequence.request.prompt.size()) > config_.max_position_embeddings;
  return is_long ? 0 : std::min(tokens, config_.max_position_embeddings);
}

// Adds published pages of other sequences to the sequence, in place of computing their tokens. The last token is always
// computed, because its logits are needed. Pages can be added only while the computed tokens fill whole pages that are
// all published; only then is the sequence's PrefixId known.
void Engine::reuse_prefix_pages(Sequence& sequence) {
  // While requested log-probs of prompt tokens are still missing, no page is reused: log-probs are computed from
  // logits, and pages contain only keys and values.
  if (sequence.scored < sequence.to_score()) return;
  while (sequence.computed_tokens % kernels::kPageTokens == 0 && sequence.pending() > kernels::kPageTokens &&
         sequence.computed_tokens + kernels::kPageTokens <= shareable_tokens(sequence) &&
         sequence.published_pages * kernels::kPageTokens == sequence.computed_tokens &&
         static_cast<int64_t>(sequence.pages.size()) == sequence.published_pages) {
    const auto page = pages_.find(sequence.prefix, sequence.page_tokens(sequence.published_pages));
    if (!page) break;
    sequence.pages.push_back(*page);
    sequence.prefix = pages_.prefix_with(*page);
    sequence.computed_tokens += kernels::kPageTokens;
    ++sequence.published_pages;
    counts_.shared_tokens += kernels::kPageTokens;
  }
}

// Gives the sequence pages for `tokens` tokens. When no page is free, other sequences are preempted: first those that
// wait for a mask, then the newest. Returns false when the sequence itself was preempted.
bool Engine::reserve_pages(Sequence& sequence, int64_t tokens) {
  while (static_cast<int64_t>(sequence.pages.size()) < pages_for(tokens)) {
    if (const auto page = pages_.allocate()) {
      sequence.pages.push_back(*page);
      continue;
    }
    auto victim = std::prev(running_.end());
    for (auto at = running_.begin(); at != running_.end(); ++at) {
      if ((*at)->pending_token && !(*at)->pages.empty()) victim = at;
    }
    auto last = std::move(*victim);
    running_.erase(victim);
    preempt(*last);
    ++counts_.preempted;
    const bool itself = last.get() == &sequence;
    waiting_.push_front(std::move(last));
    if (itself) return false;
  }
  return true;
}

// Chooses the rows of the next step, oldest sequences first: one row for each generating sequence, and up to
// prompt_block rows of prompts in total.
Engine::EngineStep Engine::plan_step() {
  EngineStep step;
  int64_t budget = options_.prompt_block;
  std::set<std::pair<PagePool::PrefixId, std::vector<int64_t>>> being_filled;
  const auto max_sequences = static_cast<size_t>(options_.max_sequences);
  for (auto at = running_.begin(); at != running_.end() && step.parts.size() < max_sequences; ++at) {
    auto& sequence = **at;
    if (sequence.pending_token) continue;  // its mask is not ready
    reuse_prefix_pages(sequence);
    int64_t rows = 1;
    if (sequence.pending() > 1) {
      // When several sequences need the same page of tokens, one of them computes it in this step. The others wait and
      // find the published page in the next step.
      if (sequence.computed_tokens % kernels::kPageTokens == 0 && sequence.pending() > kernels::kPageTokens) {
        const auto tokens = sequence.page_tokens(sequence.computed_tokens / kernels::kPageTokens);
        if (!being_filled.emplace(sequence.prefix, std::vector(tokens.begin(), tokens.end())).second) continue;
      }
      rows = std::min(sequence.pending(), budget);
      if (rows == 0) continue;
      budget -= rows;
    }
    // reserve_pages() returns false when no page was free and `sequence` itself was preempted. `sequence` was then the
    // last of running_, so the loop ends.
    if (!reserve_pages(sequence, sequence.computed_tokens + rows)) break;
    step.parts.push_back({&sequence, rows});
  }
  return step;
}

at::Tensor Engine::run_forward(const EngineStep& step) {
  StepRows all;
  const bool dynamic = config_.has_dynamic_rope();
  for (const auto& part : step.parts) {
    const auto prompt = static_cast<int64_t>(part.sequence->request.prompt.size());
    const auto first_row = static_cast<int64_t>(all.tokens.size());
    all.sequences.push_back(
        {.first_row = first_row, .rows = part.rows, .first_position = part.first(), .pages = part.sequence->pages});
    for (int64_t position = part.first(); position < part.end(); ++position) {
      all.tokens.push_back(part.sequence->tokens[static_cast<size_t>(position)]);
      all.positions.push_back(position);
      // The sequence length from which the row's rotary angles are computed. It is the length that transformers would
      // use: its first call has the whole prompt, and each later call has one new token.
      if (dynamic) all.rotary_lengths.push_back(std::max(prompt, position + 1));
    }
    for (const int64_t position : part.logits_positions()) {
      all.logits_rows.push_back(first_row + position - part.first());
    }
  }
  // Send the inputs to the other ranks, which run the same forward in run_engine_follower.
  if (options_.group) broadcast_rows(*options_.group, all);
  return forward_(store_, all);
}

// Publishes every full page of the sequence up to shareable_tokens().
void Engine::publish_full_pages(Sequence& sequence) {
  const int64_t end = std::min(sequence.computed_tokens, shareable_tokens(sequence));
  for (; (sequence.published_pages + 1) * kernels::kPageTokens <= end; ++sequence.published_pages) {
    sequence.prefix = pages_.publish(sequence.pages[static_cast<size_t>(sequence.published_pages)], sequence.prefix,
                                     sequence.page_tokens(sequence.published_pages));
  }
}

std::optional<Error> Engine::try_step(const EngineStep& step) {
  at::Tensor logits;
  try {
    logits = run_forward(step);
  } catch (const std::exception& error) {
    failed_ = options_.group != nullptr;
    if (failed_) throw;
    return as_error(error);
  }
  finish_step(step, logits);
  return std::nullopt;
}

bool Engine::step() {
  start_waiting();
  if (running_.empty()) return false;
  const at::NoGradGuard no_grad;
  advance_waiting_mask();
  const auto step = plan_step();
  if (step.parts.empty()) {  // all sequences wait for masks
    constexpr int64_t kTellAfter = 1000;
    if (++steps_without_rows_ % kTellAfter == 0) keep_alive();
    return !running_.empty() || !waiting_.empty();
  }
  if (!try_step(step)) return !running_.empty() || !waiting_.empty();
  // The forward of the whole batch failed. Each sequence is computed alone, so that only a sequence that fails again
  // ends with an error.
  for (const auto& part : step.parts) {
    const auto error = try_step({{part}});
    if (!error) continue;
    const auto& callback = part.sequence->request.on_token;
    if (callback) callback({.finish = Finish::kError, .error = error});
    cancel(part.sequence->id);
  }
  return !running_.empty() || !waiting_.empty();
}

EngineCounts Engine::counts() const {
  auto counts = counts_;
  counts.running = static_cast<int64_t>(running_.size());
  counts.waiting = static_cast<int64_t>(waiting_.size());
  counts.waiting_for_masks =
      std::ranges::count_if(running_, [](const auto& sequence) { return sequence->pending_token.has_value(); });
  counts.pages_in_use = pages_.pages_in_use();
  return counts;
}

}  // namespace tessera
