// The largest logits of a vocabulary that is sharded over ranks, and the logits at given ids.
//
//   auto [values, ids] = distributed_vocab_topk(logits, 20, part);          // [B, S, 20] each, largest first
//
// The functions have the semantics of nemo_rl's functions of the same names. COLLECTIVE over VocabShard::group
// of the argument `part`: all ranks of this group pass the same arguments, except that each rank passes its own
// `part` and its own columns of the logits. Error kShape for sizes that do not fit. chunk_size limits how many
// positions of the dim before the vocabulary are processed at a time and does not change results. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "tessera/kernels/logprobs/vocab_shard.h"

namespace tessera::kernels {

// Returns values in the compute dtype (float32; float64 for float64 logits) and int64 ids, [..., min(k, V)] each, on
// every rank. Of equal values the smaller id comes first in every layout; NaN comes before all numbers. No gradient.
std::pair<at::Tensor, at::Tensor> distributed_vocab_topk(const at::Tensor& logits, int64_t k, const VocabShard& part,
                                                         std::optional<int64_t> chunk_size = std::nullopt);
// The id of the largest logit, int64 [...].
at::Tensor vocab_parallel_argmax(const at::Tensor& logits, const VocabShard& part);

// The logits at the ids global_indices, int64 [..., K]; returns [..., K] in the compute dtype on every rank. An id
// kIgnoredLabel gives 0; another id that is no column of any rank is an error on all ranks. Differentiable: the rank
// that holds the column gets the gradient, without communication.
at::Tensor gather_logits_at_global_indices(const at::Tensor& logits, const at::Tensor& global_indices,
                                           const VocabShard& part, std::optional<int64_t> chunk_size = std::nullopt);

}  // namespace tessera::kernels
