// Log-probabilities of the tokens that follow, from logits in any layout: what training, scoring and one rank use.
//
//   at::Tensor logprobs = get_logprobs_from_vocab_parallel_logits(logits, input_ids);     // [B, S] ids -> [B, S - 1]
//
// Position t of a result holds log p(token t + 1 | tokens to t), in the compute dtype. Semantics of nemo_rl's functions
// of the same names, without context parallelism. Costs, targets and errors as logprobs.h and sampling.h: an id
// kIgnoredLabel gives 0 and no gradient at the position before it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "tessera/kernels/logprobs/sampling.h"
#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera {

struct LogprobOptions {
  std::optional<int64_t> chunk_size = std::nullopt;  // positions of each row worked on at a time; shows in no result
  std::optional<TrainingSamplingParams> sampling_params = std::nullopt;
};

// logits [B, S, V]: plain, or a DTensor whose vocabulary is cut on at most one mesh dim, evenly or not, and whose other
// dims on any; sums that are pending, and cuts of other kinds, are brought to that. input_ids int64 [B, S]: plain (of
// all rows, alike on all ranks; the result is plain and whole) or a DTensor on the same mesh (the result is one, rows
// cut as the logits'). COLLECTIVE over the logits' mesh. Without grad mode nothing is kept for a backward pass.
at::Tensor get_logprobs_from_vocab_parallel_logits(const at::Tensor& vocab_parallel_logits, const at::Tensor& input_ids,
                                                   const LogprobOptions& options = {});

// The same of this rank's columns [B, S, V of the part]. COLLECTIVE over part.group.
at::Tensor from_parallel_logits_to_logprobs(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                                            const VocabPart& part, const LogprobOptions& options = {},
                                            bool inference_only = false);

struct PackedLogprobOptions {
  std::optional<int64_t> chunk_size = std::nullopt;
  std::optional<TrainingSamplingParams> sampling_params = std::nullopt;
  bool inference_only = false;
  bool target_is_pre_rolled = false;  // target[t] is the token after t already
};
// logits [1, T, V of the part] and target [1, T] of n sequences laid end to end, sequence i at [cu_seqlens_padded[i],
// cu_seqlens_padded[i + 1]) (integers [n + 1]) -> [n, unpacked_seqlen - 1]: row i holds its sequence's log-probs,
// without the last position, cut or filled with 0 to that length. No token sees the next sequence. Padding inside a
// sequence is scored like any token: mask it, or make it kIgnoredLabel. COLLECTIVE over part.group.
at::Tensor from_parallel_logits_to_logprobs_packed_sequences(const at::Tensor& vocab_parallel_logits,
                                                             const at::Tensor& target,
                                                             const at::Tensor& cu_seqlens_padded,
                                                             int64_t unpacked_seqlen, const VocabPart& part,
                                                             const PackedLogprobOptions& options = {});

}  // namespace tessera
