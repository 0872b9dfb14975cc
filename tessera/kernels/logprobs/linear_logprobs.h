// Log-probabilities from hidden states and a linear head, without the full logits in memory.
//
//   at::Tensor logprobs = linear_logprobs(hidden, weight, targets);   // hidden [..., d], weight [V, d], targets [...]
//
// The result is that of distributed_logprob(hidden weight^T, targets), in float32 (float64 for float64 inputs). At most
// chunk_bytes of logits exist at a time. The backward pass recomputes the logits from hidden and weight, in the same
// chunks. A target kIgnoredLabel costs no computation and gives 0 and no gradient. Another target outside [0, V) is a
// kShape error on all ranks. No second derivatives. Thread-safe.
//
// DTensors (hidden and weight on the same mesh): the head's classes may be sharded on a mesh dim, and hidden's leading
// dims on other mesh dims; other placements are redistributed to such placements first. The result is a DTensor with
// the placements of hidden's leading dims. Targets are plain (of all rows, the same on all ranks) or a DTensor.
// COLLECTIVE over the mesh: one all-gather of a few numbers per row, and in the backward pass one all-reduce of
// hidden's gradient over the mesh dim that shards the classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/kernels/logprobs/vocab_shard.h"

namespace tessera::kernels {

struct LinearLogprobOptions {
  int64_t chunk_bytes = int64_t{64} << 20;
  double softcap = 0;  // logits become softcap * tanh(logits / softcap), as in Gemma; 0: unchanged
};

at::Tensor linear_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const LinearLogprobOptions& options = {});
// linear_logprobs() for plain tensors with a vocabulary that the caller has sharded: `weight` has the head's rows for
// `part`, this rank's columns of the logits. COLLECTIVE over part.group; all its ranks pass the same hidden states.
at::Tensor linear_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const VocabShard& part, const LinearLogprobOptions& options = {});

// hidden [B, S, d], input_ids [B, S] -> [B, S - 1]: position t holds the log-prob of token t + 1. The result is a plain
// tensor for plain ids.
at::Tensor from_parallel_hidden_states_to_logprobs(const at::Tensor& hidden, const at::Tensor& weight,
                                                   const at::Tensor& input_ids,
                                                   const LinearLogprobOptions& options = {});

}  // namespace tessera::kernels
