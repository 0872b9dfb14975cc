// Log-probabilities of tokens that were sampled with top-k and top-p, under the filtered distribution.
//
//   TrainingSamplingParams sampling{.top_k = 50, .top_p = 0.9};
//   at::Tensor logprobs = distributed_logprob_with_sampling(logits, targets, part, sampling);    // [B, S]
//   logprobs = mask_out_neg_inf_logprobs(logprobs, mask, "previous policy");
//
// The functions have the semantics of nemo_rl's functions of the same names. They also support uneven vocabulary
// shards and any number of tokens. A filter needs a whole row: the ranks of VocabShard::group exchange columns
// for rows with an all-to-all, so that each rank filters whole rows of its share of the tokens. Forward and
// backward exchange some rows at a time (at most 64 MiB of logits, and at most chunk_size positions); the number
// of rows does not change a bit of the results. Errors, and what the ranks must pass, are as in logprobs.h; also
// Error kConfig for a top_k above V or a top_p outside [0, 1].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "tessera/kernels/logprobs/vocab_shard.h"

namespace tessera::kernels {

struct TrainingSamplingParams {
  std::optional<int64_t> top_k = std::nullopt;  // nullopt or <= 0: all tokens
  double top_p = 1.0;                           // 1: all tokens
  double temperature = 1.0;                     // not read here: the caller has already divided the logits by it
};
// Returns whether the parameters exclude any token.
bool need_top_k_or_top_p_filtering(const TrainingSamplingParams& sampling);

// Returns the logits [..., V] with -infinity at excluded tokens, and the mask of the kept tokens (bool; undefined when
// no token is excluded). top_k keeps the logits that are at least the k-th largest, so ties may keep more than k. top_p
// sorts a row in ascending order (ties by id) and keeps the tokens whose cumulated probability, in the logits' dtype,
// is above 1 - top_p; it always keeps the largest. With both, top_p filters after top_k. chunk_size rows are filtered
// at a time. Excluded tokens have no gradient. No communication.
std::pair<at::Tensor, at::Tensor> apply_top_k_top_p(const at::Tensor& logits, const TrainingSamplingParams& sampling,
                                                    int64_t chunk_size = 256);

// log p(target), [...], under the filtered logits; -infinity for an excluded target. The filter runs in the logits'
// dtype.
at::Tensor distributed_logprob_with_sampling(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                                             const TrainingSamplingParams& sampling, bool inference_only = false);
at::Tensor chunked_distributed_logprob_with_sampling(const at::Tensor& logits, const at::Tensor& target,
                                                     const VocabShard& part, int64_t chunk_size,
                                                     const TrainingSamplingParams& sampling,
                                                     bool inference_only = false);

// Returns logprobs with 0 where a log-prob is infinite or the mask is 0. Logs a warning with `name` and the number of
// infinite log-probs that the mask had kept.
at::Tensor mask_out_neg_inf_logprobs(const at::Tensor& logprobs, const at::Tensor& mask, std::string_view name);

}  // namespace tessera::kernels
