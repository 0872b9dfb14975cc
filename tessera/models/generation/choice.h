// The choice of the next token among its scores, and its log-probs.
//
//   std::vector<float> scores(logits, logits + vocabulary);
//   const int64_t token = choose_from(scores, {.tokens = context, .prompt_tokens = 12}, options);
//
// Thread-safe; a constraint is its sequence's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tessera/models/generation/generate.h"

namespace tessera {

struct ChoiceContext {
  std::span<const int64_t> tokens{};  // prompt and what was made since
  size_t prompt_tokens = 0;           // of them; presence and frequency penalties look at the others
};

// Changes the scores. Error kInternal for scores that are not numbers, kConfig where the constraint allows no token.
int64_t choose_from(std::span<float> scores, const ChoiceContext& context, const GenerationOptions& options);

// The tokens end with a stop token, or none may follow.
bool is_ended(const ChoiceContext& context, const GenerationOptions& options);

struct TokenLogProbs {
  double chosen = 0;
  std::vector<std::pair<int64_t, double>> likeliest{};  // first the likeliest
};

// The places of the largest values, the largest first, of equals the first.
std::vector<size_t> largest_places(std::span<const float> values, size_t count);

// Natural logarithms under the model's own distribution: temperature, penalties and filters do not count.
TokenLogProbs log_probs_of(std::span<const float> logits, int64_t chosen, int64_t likeliest);

}  // namespace tessera
