// Chooses the next token from its scores, and computes log-probs.
//
//   std::vector<float> scores(logits, logits + vocabulary);
//   const int64_t token = choose_from_scores(scores, {.tokens = context, .prompt_tokens = 12}, options);
//
// Thread-safe, except that two threads must not use the same constraint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tessera/models/generation/generate.h"

namespace tessera {

struct SamplingContext {
  std::span<const int64_t> tokens{};  // the prompt and the generated tokens
  size_t prompt_tokens = 0;  // number of prompt tokens; presence and frequency penalties count the other tokens
};

// Returns the chosen token. Overwrites the scores with penalised and constrained scores. Errors: kInternal when a score
// is NaN or +inf, or when all allowed tokens have the score -inf; kConfig when the constraint allows no token.
int64_t choose_from_scores(std::span<float> scores, const SamplingContext& context, const GenerationOptions& options);

// Whether the tokens end with a stop token, or the constraint is complete.
bool is_ended(const SamplingContext& context, const GenerationOptions& options);

struct TokenLogProbs {
  double chosen = 0;
  std::vector<std::pair<int64_t, double>> top_tokens{};  // the most likely token first
};

// Returns the positions of the `count` largest values, largest first; of equal values the first.
std::vector<size_t> top_indices(std::span<const float> values, size_t count);

// Returns the log-probs (natural logarithm) of the softmax of the logits, without temperature, penalties and filters.
TokenLogProbs log_probs_of(std::span<const float> logits, int64_t chosen, int64_t num_top_tokens);

}  // namespace tessera
