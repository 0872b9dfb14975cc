// Log-probabilities from logits whose vocabulary is cut over ranks, without gathering them.
//
//   VocabPart part{.start = v0, .end = v1, .group = tp};                       // this rank's columns
//   at::Tensor logprobs = distributed_logprob(logits, targets, part);         // [B, S], float32
//   logprobs.sum().backward();                                                // no communication
//
// The functions of nemo_rl.distributed.model_utils of the same names, for vocabularies cut unevenly, any leading dims
// and one rank as well. Each makes one pass over the logits, a few rows at a time in the compute dtype (float32,
// float64 of float64), and one gather of a few numbers a row over the part's group. For the backward pass two numbers a
// row are kept, the logits themselves are read again: beside them and their gradient (in their dtype) no tensor of
// [tokens, V] is made. The chunked_ functions bound how many positions of the dim before the vocabulary are worked on
// at a time, which shows in no bit of their results.
//
// COLLECTIVE over part.group: all its ranks call with the same targets and shapes, up to their columns. Targets are
// int64 with the logits' leading shape. A target kIgnoredLabel gives 0 and no gradient; any other that is no column of
// any rank is a kShape error on all ranks. inference_only (and no-grad mode) keeps nothing: the result has no gradient.
// There are no second derivatives. Errors kShape for sizes that do not fit. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/base/ignored_label.h"
#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera::kernels {

// log p(target) [...] of logits [..., V of the part].
at::Tensor distributed_logprob(const at::Tensor& logits, const at::Tensor& target, const VocabPart& part,
                               bool inference_only = false);
at::Tensor chunked_distributed_logprob(const at::Tensor& logits, const at::Tensor& target, const VocabPart& part,
                                       int64_t chunk_size, bool inference_only = false);

// log p(id) [..., K] at global_indices [..., K]; an id that is there twice has its gradients added.
at::Tensor chunked_distributed_gather_logprob(const at::Tensor& logits, const at::Tensor& global_indices,
                                              const VocabPart& part, int64_t chunk_size, bool inference_only = false);

// sum p log p [...], which is MINUS the entropy, as upstream's function of this name gives it. Tokens of probability 0
// add 0 (upstream: NaN).
at::Tensor chunked_distributed_entropy(const at::Tensor& logits, const VocabPart& part, int64_t chunk_size,
                                       bool inference_only = false);

// -sum p_target log p_student [...] of logits of one shape. The gradient is the student's alone.
at::Tensor distributed_cross_entropy(const at::Tensor& student_logits, const at::Tensor& target_logits,
                                     const VocabPart& part, bool inference_only = false);

// log_softmax over the whole vocabulary [..., V of the part], in the logits' dtype. The backward pass is COLLECTIVE
// over the group, too.
at::Tensor compute_distributed_log_softmax(const at::Tensor& logits, const VocabPart& part);
// softmax likewise; without a gradient.
at::Tensor compute_distributed_softmax(const at::Tensor& logits, const VocabPart& part);
// The first of logits / temperature in the compute dtype.
at::Tensor vocab_parallel_log_softmax(const at::Tensor& logits, const VocabPart& part, double temperature = 1.0);

}  // namespace tessera::kernels
