// Log-probabilities of the tokens that follow, from logits in any layout: what training, scoring and one rank use.
//
//   at::Tensor logprobs = get_logprobs_from_vocab_parallel_logits(logits, input_ids);     // [B, S] ids -> [B, S - 1]
//
// Position t of a result holds log p(token t + 1 | tokens to t), in the compute dtype. Semantics of nemo_rl's functions
// of the same names. Costs, targets and errors as logprobs.h and sampling.h: an id kIgnoredLabel gives 0 and no
// gradient at the position before it. Under context parallelism results are whole, in the order of the sequence, on all
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "tessera/kernels/logprobs/sampling.h"
#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera::kernels {

struct LogprobOptions {
  std::optional<int64_t> chunk_size = std::nullopt;  // positions of each row worked on at a time; shows in no result
  std::optional<TrainingSamplingParams> sampling_params = std::nullopt;
  // Of a DTensor alone: the place in the sequence of each token of the logits, int64 [S], a permutation; plain or a
  // DTensor. Undefined: the logits lie in the order of the sequence.
  at::Tensor seq_index = {};
  // Of this rank's columns alone: the ranks over which the tokens lie.
  std::shared_ptr<comm::Group> cp_group = nullptr;
};

// logits [B, S, V]: plain, or a DTensor whose vocabulary is cut on at most one mesh dim, evenly or not, and whose other
// dims on any; sums that are pending, and cuts of other kinds, are brought to that. input_ids int64 [B, S]: plain (of
// all rows, alike on all ranks; the result is plain and whole) or a DTensor on the same mesh (the result is one, rows
// cut as the logits'). With seq_index, whose mesh must have a dim "cp", plain ids are in the order of the sequence,
// those of a DTensor lie as the logits do, and the result is plain and whole in either case. COLLECTIVE over the
// logits' mesh. Without grad mode nothing is kept for a backward pass.
at::Tensor get_logprobs_from_vocab_parallel_logits(const at::Tensor& vocab_parallel_logits, const at::Tensor& input_ids,
                                                   const LogprobOptions& options = {});

// The same of this rank's columns [B, S, V of the part]. COLLECTIVE over part.group. With cp_group the logits are those
// of this rank's tokens as ContextLayout cuts the S of `target`, which is whole and alike on all ranks, or as it cuts a
// longer sequence that 2 * ranks divides, of which the rest is padding; COLLECTIVE over cp_group, too, as is the
// backward pass: the gradients of all ranks' results are added, so those of a loss that all compute alike come out as
// many times.
at::Tensor from_parallel_logits_to_logprobs(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                                            const VocabPart& part, const LogprobOptions& options = {},
                                            bool inference_only = false);

struct PackedLogprobOptions {
  std::optional<int64_t> chunk_size = std::nullopt;
  std::optional<TrainingSamplingParams> sampling_params = std::nullopt;
  bool inference_only = false;
  bool target_is_pre_rolled = false;  // target[t] is the token after t already
  // The ranks over which each sequence lies, balanced on its own: of sequence i a rank has the tokens [bound[i] /
  // ranks, bound[i + 1] / ranks) of its T / ranks. 2 * ranks divides every difference of bounds. `target` is whole, or
  // where it is rolled already this rank's [1, T / ranks].
  std::shared_ptr<comm::Group> cp_group = nullptr;
};
// logits [1, T, V of the part] and target [1, T] of n sequences laid end to end, sequence i at [cu_seqlens_padded[i],
// cu_seqlens_padded[i + 1]) (integers [n + 1], of the whole T) -> [n, unpacked_seqlen - 1]: row i holds its sequence's
// log-probs, without the last position, cut or filled with 0 to that length. No token sees the next sequence. Padding
// inside a sequence is scored like any token: mask it, or make it kIgnoredLabel. COLLECTIVE over part.group, with
// cp_group over that as well; gradients as above.
at::Tensor from_parallel_logits_to_logprobs_packed_sequences(const at::Tensor& vocab_parallel_logits,
                                                             const at::Tensor& target,
                                                             const at::Tensor& cu_seqlens_padded,
                                                             int64_t unpacked_seqlen, const VocabPart& part,
                                                             const PackedLogprobOptions& options = {});

}  // namespace tessera::kernels
