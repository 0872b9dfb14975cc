// Log-probabilities from hidden states and a linear head, without its logits.
//
//   at::Tensor logprobs = linear_logprobs(hidden, weight, targets);   // hidden [..., d], weight [V, d], targets [...]
//
// What distributed_logprob(hidden weight^T, targets) gives, in float32 (float64 of float64), while logits of at most
// chunk_bytes exist at a time, in the backward pass too, which computes them again from hidden and weight. A target
// kIgnoredLabel costs nothing and gives 0 and no gradient; any other outside [0, V) is a kShape error on all ranks.
// There are no second derivatives. Thread-safe.
//
// DTensors (hidden and weight, on one mesh): classes are computed on where the head's rows are cut on a mesh dim, rows
// where hidden's leading dims are; other cuts are brought to that. The result is a DTensor that lies as hidden's
// leading dims. Targets are plain (of all rows, alike on all ranks) or a DTensor. COLLECTIVE over the mesh: one gather
// of a few numbers a row, and in the backward pass one sum of hidden's gradient over the classes' dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera::kernels {

struct LinearLogprobOptions {
  int64_t chunk_bytes = int64_t{64} << 20;
  double softcap = 0;  // logits are softcap * tanh(logits / softcap), as in Gemma; 0: as they are
};

at::Tensor linear_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const LinearLogprobOptions& options = {});
// Of plain tensors, where weight holds the part's rows of the head. COLLECTIVE over part.group, whose ranks have the
// same hidden states.
at::Tensor linear_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const VocabPart& part, const LinearLogprobOptions& options = {});

// hidden [B, S, d], input_ids [B, S] -> [B, S - 1]: at t the log-prob of token t + 1. Plain for plain ids.
at::Tensor from_parallel_hidden_states_to_logprobs(const at::Tensor& hidden, const at::Tensor& weight,
                                                   const at::Tensor& input_ids,
                                                   const LinearLogprobOptions& options = {});

}  // namespace tessera::kernels
