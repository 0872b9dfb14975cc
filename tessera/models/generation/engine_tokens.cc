// What an Engine does with the logits of a step: log-probs of prompts, masks of constraints, and the choice of tokens.
#include <ATen/Parallel.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/models/generation/engine_impl.h"
#include "tessera/models/generation/logits_check.h"
#include "tessera/text/grammar/token_constraint.h"

namespace tessera {

// Phase 1 computes the mask of allowed tokens and chooses the next token. Phase 2 computes another mask to check
// whether the constraint is complete. Each phase may have to wait for its mask; pending_token.has_token is true after
// phase 1, so that a later call continues with phase 2. Errors end this sequence only.
bool Engine::advance_choice(Sequence& sequence, std::span<const float> logits, int64_t mask_steps) {
  const auto& request = sequence.request;
  auto& pending_token = *sequence.pending_token;
  auto& new_token = pending_token.new_token;
  const auto steps = static_cast<uint64_t>(mask_steps);
  try {
    const auto since_prompt = [&] { return std::span<const int64_t>(sequence.tokens).subspan(request.prompt.size()); };
    auto* constraint = request.options.constraint.get();
    if (!pending_token.has_token) {
      // Check the logits before prepare_allowed_tokens() computes the mask of the constraint: the mask is expensive,
      // and invalid logits end the sequence anyway. choose_from_scores() checks the logits again.
      if (constraint) check_logits(logits, sequence.tokens.size());
      if (constraint && !constraint->prepare_allowed_tokens(since_prompt(), steps)) return false;
      std::vector<float> scores(logits.begin(), logits.end());
      new_token.token = choose_from_scores(scores, {sequence.tokens, request.prompt.size()}, request.options);
      if (request.log_probs) new_token.log_probs = log_probs_of(logits, new_token.token, *request.log_probs);
      sequence.tokens.push_back(new_token.token);
      pending_token.has_token = true;
    }
    const SamplingContext context{sequence.tokens, request.prompt.size()};
    const auto& stops = request.options.stop_tokens;
    const bool is_stop = std::ranges::find(stops, new_token.token) != stops.end();
    if (constraint && !is_stop && !constraint->prepare_complete(since_prompt(), steps)) return false;
    if (is_ended(context, request.options)) {
      new_token.finish = Finish::kStop;
    } else if (static_cast<int64_t>(sequence.tokens.size()) >= sequence.max_tokens) {
      new_token.finish = Finish::kLength;
    }
  } catch (const std::exception& error) {
    new_token.finish = Finish::kError;
    new_token.error = as_error(error);
  }
  return true;
}

// Passes the new token to the callback, and ends the sequence after its last token.
void Engine::emit_token(Sequence& sequence) {
  auto new_token = std::move(sequence.pending_token->new_token);
  const bool first =
      sequence.tokens.size() == sequence.request.prompt.size() + (sequence.pending_token->has_token ? 1 : 0);
  if (first) new_token.prompt_log_probs = std::move(sequence.scores);
  if (new_token.finish != Finish::kError) ++counts_.new_tokens;
  sequence.pending_token.reset();
  const bool goes_on = !sequence.request.on_token || sequence.request.on_token(new_token);
  if (new_token.finish || !goes_on) cancel(sequence.id);
}

// Calls advance_choice() for one sequence that waits for a token mask. The waiting sequences take turns by ascending
// id: the next one has the smallest id above last_advanced_, or the smallest id of all if there is none.
void Engine::advance_waiting_mask() {
  Sequence* next = nullptr;
  for (const auto& sequence : running_) {
    if (!sequence->pending_token) continue;
    const auto turn = [&](const Sequence& of) { return std::pair(of.id <= last_advanced_, of.id); };
    if (!next || turn(*sequence) < turn(*next)) next = sequence.get();
  }
  if (!next) return;
  last_advanced_ = next->id;
  if (advance_choice(*next, next->pending_token->logits, options_.mask_steps)) emit_token(*next);
}

// Several threads call this at the same time for different rows of logits. There is no data race: rows of one sequence
// write different elements of `scores`, and only one row per sequence chooses a token.
void Engine::use_logits_row(LogitsRow& logits_row, std::span<const float> logits, int64_t mask_steps) const {
  auto& sequence = *logits_row.sequence;
  const auto& request = sequence.request;
  if (!logits_row.chooses) {
    try {
      check_logits(logits, logits_row.position + 1);
      sequence.scores[logits_row.position] =
          log_probs_of(logits, request.prompt[logits_row.position + 1], *request.log_probs);
    } catch (const std::exception& error) {
      logits_row.error = as_error(error);  // stored per row: other rows of the sequence are read on other threads
    }
    return;
  }
  sequence.pending_token.emplace();
  logits_row.chosen = advance_choice(sequence, logits, mask_steps);
  if (!logits_row.chosen) sequence.pending_token->logits.assign(logits.begin(), logits.end());
}

void Engine::finish_step(const EngineStep& step, const at::Tensor& logits) {
  std::vector<LogitsRow> logits_rows;  // for each row of the logits
  for (const auto& part : step.parts) {
    auto& sequence = *part.sequence;
    for (const int64_t position : part.logits_positions()) {
      const auto at = static_cast<size_t>(position);
      logits_rows.push_back({.sequence = &sequence, .position = at, .chooses = at + 1 == sequence.tokens.size()});
    }
    if (part.rows > 1) counts_.prompt_tokens += part.rows;
    sequence.computed_tokens += part.rows;
    sequence.scored = std::max(sequence.scored, std::min(sequence.computed_tokens, sequence.to_score()));
    publish_full_pages(sequence);
  }
  ++counts_.steps;
  const auto vocabulary = static_cast<size_t>(logits.size(1));
  const float* all = logits.const_data_ptr<float>();
  const int64_t share = std::max<int64_t>(1, 16384 / logits.size(1));
  // Up to four masks may each take options_.mask_steps steps in this engine step. More than four masks share four times
  // mask_steps. A sequence whose mask needs more steps waits.
  constexpr int64_t kFew = 4;
  const auto masks = std::ranges::count_if(logits_rows, [](const LogitsRow& logits_row) {
    return logits_row.chooses && logits_row.sequence->request.options.constraint;
  });
  const int64_t mask_steps = std::max<int64_t>(1, options_.mask_steps * kFew / std::max<int64_t>(masks, kFew));
  at::parallel_for(0, static_cast<int64_t>(logits_rows.size()), share, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = static_cast<size_t>(i);
      use_logits_row(logits_rows[row], {all + row * vocabulary, vocabulary}, mask_steps);
    }
  });
  // The sequences' callbacks (on_token) run on the thread that called finish_step(), in the order of the rows. If a row
  // has an error, its sequence ends, and later rows of this sequence are skipped.
  std::set<const Sequence*> ended;  // ended and freed
  for (auto& logits_row : logits_rows) {
    if (ended.contains(logits_row.sequence)) continue;
    if (logits_row.error) {
      auto& pending_token = logits_row.sequence->pending_token.emplace();
      pending_token.new_token.finish = Finish::kError;
      pending_token.new_token.error = logits_row.error;
      ended.insert(logits_row.sequence);
      emit_token(*logits_row.sequence);
    } else if (logits_row.chosen) {
      emit_token(*logits_row.sequence);
    }
  }
}

}  // namespace tessera
