#include "tessera/models/generation/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/philox.h"
#include "tessera/models/generation/logits_check.h"
#include "tessera/text/grammar/token_constraint.h"

namespace tessera {
namespace {

constexpr uint64_t kSamplingStream = 0x73616d706c65;  // differs from the streams of init_weights
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr size_t kFirstSorted = 256;  // tokens that are sorted first; mostly enough for top-p

struct TokenCandidate {
  int64_t token;
  double weight;  // first the scaled logit, then its exponential
};

// Sorts by descending weight. Equal weights are sorted by ascending token id, so that the order does not depend on the
// sort algorithm.
bool before(const TokenCandidate& a, const TokenCandidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

// Returns the tokens of the sequence that follow its prompt.
std::span<const int64_t> generated_tokens(const SamplingContext& context) {
  return context.tokens.subspan(std::min(context.prompt_tokens, context.tokens.size()));
}

// Applies logit_bias, then the repetition penalty (prompt and generated tokens), then presence and frequency penalties
// (generated tokens only).
void apply_penalties(std::span<float> scores, const SamplingContext& context, const GenerationOptions& options) {
  for (const auto& [token, bias] : options.logit_bias) {
    if (static_cast<size_t>(token) < scores.size()) scores[static_cast<size_t>(token)] += bias;
  }
  if (options.repetition_penalty != 1.0) {
    std::vector<bool> seen(scores.size());
    const auto penalty = static_cast<float>(options.repetition_penalty);
    for (const int64_t token : context.tokens) {
      const auto at = static_cast<size_t>(token);
      if (at >= scores.size() || seen[at]) continue;
      seen[at] = true;
      scores[at] = scores[at] > 0 ? scores[at] / penalty : scores[at] * penalty;
    }
  }
  if (options.presence_penalty == 0 && options.frequency_penalty == 0) return;
  std::unordered_map<int64_t, int64_t> counts;
  for (const int64_t token : generated_tokens(context)) ++counts[token];
  for (const auto& [token, count] : counts) {
    scores[static_cast<size_t>(token)] -=
        static_cast<float>(options.presence_penalty + options.frequency_penalty * static_cast<double>(count));
  }
}

void apply_constraint(std::span<float> scores, const SamplingContext& context, text::TokenConstraint& constraint) {
  const auto allowed = constraint.allowed(generated_tokens(context));
  for (size_t token = 0; token < scores.size(); ++token) {
    if (token >= allowed.size() || !allowed[token]) scores[token] = kNever;
  }
}

double sum_of(std::span<const TokenCandidate> candidates) {
  return std::accumulate(candidates.begin(), candidates.end(), 0.0,
                         [](double sum, const auto& c) { return sum + c.weight; });
}

// Returns the smallest number of first candidates whose weights sum to at least share * total. Only the first `sorted`
// candidates are sorted. If their sum is smaller and there are more candidates, `enough` becomes false.
size_t count_to_reach_share(std::span<const TokenCandidate> candidates, size_t sorted, double share, double total,
                            bool& enough) {
  double sum = 0;
  size_t kept = 0;
  while (kept < sorted && (kept == 0 || sum < share * total)) sum += candidates[kept++].weight;
  enough = sum >= share * total || sorted == candidates.size();
  return kept;
}

// Applies top-k, then top-p, then min-p. The weights of the result are unnormalised: exp((score - max) / temperature).
std::vector<TokenCandidate> filter_candidates(std::span<const float> scores, const GenerationOptions& options) {
  std::vector<TokenCandidate> all;
  all.reserve(scores.size());
  const double max_score = *std::ranges::max_element(scores);
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] == kNever) continue;
    // Subtract the largest score, so that exp() cannot overflow at any temperature.
    all.push_back({static_cast<int64_t>(i), (static_cast<double>(scores[i]) - max_score) / options.temperature});
  }
  const auto sort_first = [&all](size_t count) {
    std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), all.end(), before);
  };
  if (options.top_k > 0 && static_cast<size_t>(options.top_k) < all.size()) {
    sort_first(static_cast<size_t>(options.top_k));
    all.resize(static_cast<size_t>(options.top_k));
  } else if (options.top_p < 1) {
    // The vocabulary is large and top-p mostly keeps few tokens, so sort only the kFirstSorted most likely tokens. If
    // their probabilities sum to less than top_p, all candidates are sorted below.
    sort_first(std::min(kFirstSorted, all.size()));
  }
  for (auto& candidate : all) candidate.weight = std::exp(candidate.weight);
  if (options.top_p < 1) {
    const double total = sum_of(all);
    const bool cut = options.top_k > 0;
    bool enough = false;
    size_t kept =
        count_to_reach_share(all, cut ? all.size() : std::min(kFirstSorted, all.size()), options.top_p, total, enough);
    if (!enough) {
      std::ranges::sort(all, before);
      kept = count_to_reach_share(all, all.size(), options.top_p, total, enough);
    }
    all.resize(kept);
  }
  if (options.min_p > 0) std::erase_if(all, [&](const TokenCandidate& c) { return c.weight < options.min_p; });
  return all;
}

int64_t sample_from(std::span<const float> scores, size_t position, const GenerationOptions& options) {
  // Draws a random number between 0 and the sum of all weights, and returns the candidate at which the running sum of
  // the weights reaches it. The random number depends only on the seed and the position.
  const auto candidates = filter_candidates(scores, options);
  const double point = philox_uniform(philox(options.seed, position, kSamplingStream)) * sum_of(candidates);
  double sum = 0;
  for (const auto& candidate : candidates) {
    sum += candidate.weight;
    if (point <= sum) return candidate.token;
  }
  return candidates.back().token;
}

}  // namespace

int64_t choose_from_scores(std::span<float> scores, const SamplingContext& context, const GenerationOptions& options) {
  check_logits(scores, context.tokens.size());
  apply_penalties(scores, context, options);
  if (options.constraint) apply_constraint(scores, context, *options.constraint);
  const auto best = std::ranges::max_element(scores);
  TESSERA_CHECK(
      std::isfinite(*best), ErrorKind::kInternal,
      "[models.generate] position {}: the largest score of an allowed token is {}. The model overflows there: "
      "take a wider --dtype, or look at its weights with 'tessera ckpt verify'.",
      context.tokens.size(), *best);
  return options.sample ? sample_from(scores, context.tokens.size(), options) : best - scores.begin();
}

bool is_ended(const SamplingContext& context, const GenerationOptions& options) {
  const auto& stops = options.stop_tokens;
  return std::ranges::find(stops, context.tokens.back()) != stops.end() ||
         (options.constraint && options.constraint->complete(generated_tokens(context)));
}

std::vector<size_t> top_indices(std::span<const float> values, size_t count) {
  std::vector<size_t> indices(values.size());
  std::iota(indices.begin(), indices.end(), 0);
  count = std::min(count, indices.size());
  std::partial_sort(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(count), indices.end(),
                    [&](size_t a, size_t b) { return values[a] != values[b] ? values[a] > values[b] : a < b; });
  indices.resize(count);
  return indices;
}

// log p = logit - log(sum(exp(logits))), with the maximum subtracted before exp() so that it cannot overflow.
TokenLogProbs log_probs_of(std::span<const float> logits, int64_t chosen, int64_t num_top_tokens) {
  const double max_logit = *std::ranges::max_element(logits);
  double total = 0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit) - max_logit);
  const double base = max_logit + std::log(total);
  TokenLogProbs log_probs{.chosen = static_cast<double>(logits[static_cast<size_t>(chosen)]) - base};
  if (num_top_tokens == 0) return log_probs;
  for (const size_t token : top_indices(logits, static_cast<size_t>(num_top_tokens))) {
    log_probs.top_tokens.emplace_back(static_cast<int64_t>(token), static_cast<double>(logits[token]) - base);
  }
  return log_probs;
}

}  // namespace tessera
