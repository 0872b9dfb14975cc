// Log-probabilities of tokens that were drawn with top-k and top-p: under the distribution that they were drawn from.
//
//   TrainingSamplingParams sampling{.top_k = 50, .top_p = 0.9};
//   at::Tensor logprobs = distributed_logprob_with_sampling(logits, targets, part, sampling);    // [B, S]
//   logprobs = mask_out_neg_inf_logprobs(logprobs, mask, "previous policy");
//
// Semantics of nemo_rl's functions of the same names, for vocabularies cut unevenly and any number of tokens. To filter
// a row needs all of it: the ranks of the part exchange columns for rows, so that each has whole rows of its share of
// the tokens, some rows at a time (at most 64 MiB of logits, and chunk_size positions), forward and backward. The
// results are the same bits for any such chunk. Errors and ranks as logprobs.h; kConfig for a top_k above V and a top_p
// outside [0, 1].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera::kernels {

struct TrainingSamplingParams {
  std::optional<int64_t> top_k = std::nullopt;  // nullopt, 0 and below: all tokens
  double top_p = 1.0;                           // 1: all tokens
  double temperature = 1.0;                     // the logits are to be divided by it already; not read here
};
// Whether anything is left out.
bool need_top_k_or_top_p_filtering(const TrainingSamplingParams& sampling);

// logits [..., V] with -infinity where a token is left out, and which are kept (bool; undefined when nothing is left
// out). top_k keeps what is at least the k-th largest, so ties may keep more. top_p goes up the sorted row (ties by id)
// and keeps what lies above a cumulated probability of 1 - top_p, computed in the logits' dtype, always the largest;
// after top_k where there are both. chunk_size rows at a time. Left-out tokens have no gradient. No communication.
std::pair<at::Tensor, at::Tensor> apply_top_k_top_p(const at::Tensor& logits, const TrainingSamplingParams& sampling,
                                                    int64_t chunk_size = 256);

// log p(target) [...] of the filtered logits, -infinity for a target that is left out. Filtered in the logits' dtype.
at::Tensor distributed_logprob_with_sampling(const at::Tensor& logits, const at::Tensor& target, const VocabPart& part,
                                             const TrainingSamplingParams& sampling, bool inference_only = false);
at::Tensor chunked_distributed_logprob_with_sampling(const at::Tensor& logits, const at::Tensor& target,
                                                     const VocabPart& part, int64_t chunk_size,
                                                     const TrainingSamplingParams& sampling,
                                                     bool inference_only = false);

// 0 where a log-prob is infinite or mask is 0; warns about how many infinite ones the mask had left, naming them.
at::Tensor mask_out_neg_inf_logprobs(const at::Tensor& logprobs, const at::Tensor& mask, std::string_view name);

}  // namespace tessera::kernels
