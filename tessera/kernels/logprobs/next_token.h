// Log-probabilities of the next tokens, from logits in any layout: for training, scoring and a single rank.
//
//   at::Tensor logprobs = get_logprobs_from_vocab_parallel_logits(logits, input_ids);     // [B, S] ids -> [B, S - 1]
//
// Position t of a result holds log p(token t + 1 | tokens 0 to t), in the compute dtype. The functions have the
// semantics of nemo_rl's functions of the same names. Costs, targets and errors are those of logprobs.h and sampling.h:
// an id kIgnoredLabel gives 0 and no gradient at the position before it. Under context parallelism the results are
// whole, in the order of the sequence, on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "tessera/kernels/logprobs/sampling.h"
#include "tessera/kernels/logprobs/vocab_shard.h"

namespace tessera::kernels {

struct LogprobOptions {
  std::optional<int64_t> chunk_size = std::nullopt;  // positions of each row processed at once; does not change results
  std::optional<TrainingSamplingParams> sampling_params = std::nullopt;
  // For DTensor logits only: the position in the sequence of each token of the logits, int64 [S], a permutation; a
  // plain tensor or a DTensor. Undefined: the logits are in the order of the sequence.
  at::Tensor seq_index = {};
  // For from_parallel_logits_to_logprobs only: the group over which the tokens are sharded.
  std::shared_ptr<comm::Group> cp_group = nullptr;
};

// logits [B, S, V]: a plain tensor, or a DTensor. A DTensor's vocabulary may be sharded on at most one mesh dim, evenly
// or unevenly, and its other dims on any mesh dims; Partial and other placements are redistributed to such placements.
//
// input_ids int64 [B, S]: a plain tensor of all rows, the same on all ranks, gives a plain whole result. A DTensor on
// the same mesh gives a DTensor whose rows are sharded as the rows of the logits.
//
// With seq_index the mesh must have a dim "cp". Plain ids are then in the order of the sequence, ids of a DTensor are
// sharded as the logits, and the result is plain and whole in both cases.
//
// COLLECTIVE over the logits' mesh. In no-grad mode nothing is kept for a backward pass.
at::Tensor get_logprobs_from_vocab_parallel_logits(const at::Tensor& vocab_parallel_logits, const at::Tensor& input_ids,
                                                   const LogprobOptions& options = {});

// Does the same as get_logprobs_from_vocab_parallel_logits, for this rank's columns of plain logits, [B, S, V of the
// part]. COLLECTIVE over part.group.
//
// With cp_group the logits belong to this rank's tokens. ContextLayout shards the S tokens of `target`, which is whole
// and the same on all ranks; or it shards a longer sequence that 2 * ranks divides, whose tokens after S are padding.
// The call and its backward pass are then COLLECTIVE over cp_group, too. The backward adds the gradients of all ranks'
// results: where all ranks compute the same loss, the gradient is `ranks` times as large as on a single rank.
at::Tensor from_parallel_logits_to_logprobs(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                                            const VocabShard& part, const LogprobOptions& options = {},
                                            bool inference_only = false);

struct PackedLogprobOptions {
  std::optional<int64_t> chunk_size = std::nullopt;
  std::optional<TrainingSamplingParams> sampling_params = std::nullopt;
  bool inference_only = false;
  bool target_is_pre_rolled = false;  // target[t] is already the token after t
  // The group over which each sequence is sharded separately, in ContextLayout's balanced order. With bound =
  // cu_seqlens_padded, sequence i is at [bound[i] / ranks, bound[i + 1] / ranks) of a rank's T / ranks tokens. The
  // length of every sequence must be a multiple of 2 * ranks. `target` is whole; with target_is_pre_rolled it is this
  // rank's [1, T / ranks].
  std::shared_ptr<comm::Group> cp_group = nullptr;
};
// For packed sequences: logits [1, T, V of the part] and target [1, T] hold n sequences one after another. Sequence i
// is at [cu_seqlens_padded[i], cu_seqlens_padded[i + 1]) (integers [n + 1], positions in the row of all T tokens).
//
// Returns [n, unpacked_seqlen - 1]: row i holds the log-probs of sequence i without its last position, cut or filled
// with 0 to that length. No log-prob uses a token of the next sequence. Padding inside a sequence is scored as any
// token; mask the result, or set the padding's ids to kIgnoredLabel.
//
// COLLECTIVE over part.group, and over cp_group where it is set. Gradients as in from_parallel_logits_to_logprobs.
at::Tensor from_parallel_logits_to_logprobs_packed_sequences(const at::Tensor& vocab_parallel_logits,
                                                             const at::Tensor& target,
                                                             const at::Tensor& cu_seqlens_padded,
                                                             int64_t unpacked_seqlen, const VocabShard& part,
                                                             const PackedLogprobOptions& options = {});

}  // namespace tessera::kernels
