// Log-probabilities from logits whose vocabulary is sharded over ranks, without gathering the logits.
//
//   VocabShard part{.start = v0, .end = v1, .group = tp};                       // this rank's columns
//   at::Tensor logprobs = distributed_logprob(logits, targets, part);         // [B, S], float32
//   logprobs.sum().backward();                                                // no communication
//
// The functions match those of the same names in nemo_rl.distributed.model_utils. They also support uneven shards, any
// leading dims, and a single rank.
//
// Each function reads the logits once, a few rows at a time, in the compute dtype (float32; float64 for float64
// logits), and all-gathers a few numbers per row over the part's group. For the backward pass it keeps two numbers per
// row and reads the logits again. No tensor of [tokens, V] exists except the logits and their gradient, which is in the
// logits' dtype. The chunked_ functions limit how many positions of the dim before the vocabulary are processed at a
// time; the limit does not change a bit of the results.
//
// COLLECTIVE over part.group: all its ranks call with the same targets and the same shapes, except for their columns.
// Targets are int64 with the logits' leading shape. A target kIgnoredLabel gives 0 and no gradient; another target that
// is no column of any rank is a kShape error on all ranks. With inference_only (or in no-grad mode) nothing is kept and
// the result has no gradient. No second derivatives. Error kShape for sizes that do not fit. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/base/ignored_label.h"
#include "tessera/kernels/logprobs/vocab_shard.h"

namespace tessera::kernels {

// log p(target), [...], from logits [..., V of the part].
at::Tensor distributed_logprob(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                               bool inference_only = false);
at::Tensor chunked_distributed_logprob(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                                       int64_t chunk_size, bool inference_only = false);

// log p(id), [..., K], for the ids global_indices [..., K]. The gradients of an id that occurs twice are added.
at::Tensor chunked_distributed_gather_logprob(const at::Tensor& logits, const at::Tensor& global_indices,
                                              const VocabShard& part, int64_t chunk_size, bool inference_only = false);

// sum p log p, [...]: MINUS the entropy, as nemo_rl's function of this name returns it. Tokens of probability 0 add 0
// (in nemo_rl: NaN).
at::Tensor chunked_distributed_entropy(const at::Tensor& logits, const VocabShard& part, int64_t chunk_size,
                                       bool inference_only = false);

// -sum p_target log p_student, [...], from two logits of the same shape. Only student_logits get a gradient.
at::Tensor distributed_cross_entropy(const at::Tensor& student_logits, const at::Tensor& target_logits,
                                     const VocabShard& part, bool inference_only = false);

// log_softmax over the whole vocabulary, of which each rank gets its own columns, [..., V of the part], in the logits'
// dtype. The forward and the backward pass are both COLLECTIVE over part.group.
at::Tensor compute_distributed_log_softmax(const at::Tensor& logits, const VocabShard& part);
// softmax over the whole vocabulary, without a gradient.
at::Tensor compute_distributed_softmax(const at::Tensor& logits, const VocabShard& part);
// compute_distributed_log_softmax of logits / temperature, in the compute dtype.
at::Tensor vocab_parallel_log_softmax(const at::Tensor& logits, const VocabShard& part, double temperature = 1.0);

}  // namespace tessera::kernels
