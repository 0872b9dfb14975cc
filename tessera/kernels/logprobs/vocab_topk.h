// The largest logits of a vocabulary that is cut over ranks, and logits at given ids.
//
//   auto [values, ids] = distributed_vocab_topk(logits, 20, part);          // [B, S, 20] each, largest first
//
// Semantics of nemo_rl's functions of the same names. COLLECTIVE over part.group, with the same arguments up to the
// columns. Errors kShape for sizes that do not fit. chunk_size, where given, bounds how many positions of the dim
// before the vocabulary are worked on at a time and shows in no result. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera::kernels {

// Values in the compute dtype (float32, float64 of float64) and int64 ids [..., min(k, V)], on every rank; of equal
// ones the smaller id first, whatever the layout, and NaN before all. No gradient.
std::pair<at::Tensor, at::Tensor> distributed_vocab_topk(const at::Tensor& logits, int64_t k, const VocabPart& part,
                                                         std::optional<int64_t> chunk_size = std::nullopt);
// int64 [...]: the id of the largest.
at::Tensor vocab_parallel_argmax(const at::Tensor& logits, const VocabPart& part);

// The logits [..., K] at global_indices int64 [..., K], in the compute dtype, on every rank; kIgnoredLabel gives 0, any
// other id that no rank has is an error on all. Differentiable: the gradient goes to the rank that has the column,
// without communication.
at::Tensor gather_logits_at_global_indices(const at::Tensor& logits, const at::Tensor& global_indices,
                                           const VocabPart& part, std::optional<int64_t> chunk_size = std::nullopt);

}  // namespace tessera::kernels
