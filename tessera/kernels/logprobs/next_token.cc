#include "tessera/kernels/logprobs/next_token.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/attention/context_layout.h"
#include "tessera/kernels/logprobs/detail/context_tokens.h"
#include "tessera/kernels/logprobs/detail/local_columns.h"
#include "tessera/kernels/logprobs/logprobs.h"
#include "tessera/kernels/loss/head_chunks.h"

namespace tessera::kernels {
namespace {

at::Tensor logprobs_of(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                       const LogprobOptions& options, bool inference_only) {
  if (options.sampling_params && need_top_k_or_top_p_filtering(*options.sampling_params)) {
    const auto& sampling = *options.sampling_params;
    return options.chunk_size ? chunked_distributed_logprob_with_sampling(logits, target, part, *options.chunk_size,
                                                                          sampling, inference_only)
                              : distributed_logprob_with_sampling(logits, target, part, sampling, inference_only);
  }
  return options.chunk_size ? chunked_distributed_logprob(logits, target, part, *options.chunk_size, inference_only)
                            : distributed_logprob(logits, target, part, inference_only);
}

void check_next_tokens(const char* verb, c10::IntArrayRef logits, const at::Tensor& ids) {
  TESSERA_CHECK(
      logits.size() == 3 && ids.scalar_type() == at::kLong && ids.sizes() == logits.slice(0, 2) && logits[1] > 0,
      ErrorKind::kShape, "[kernels.{}] found logits {} and {} ids {}: wanted [B, S, V] and int64 [B, S]", verb,
      c10::str(logits), c10::toString(ids.scalar_type()), c10::str(ids.sizes()));
}

at::Tensor without_last(const at::Tensor& values) { return values.narrow(1, 0, values.size(1) - 1); }

// ---- DTensors ----

// The placements to which the logits are redistributed, and the mesh dim that shards their vocabulary (-1: none).
struct LogitLayout {
  Placements logits;
  Placements rows;  // of tensors with one value per row
  int64_t vocab_dim = -1;
};

// Keeps the Shard placements of the dims B and S, and the first Shard of the vocabulary dim; all other placements
// become Replicate.
LogitLayout layout_of(const at::Tensor& logits) {
  LogitLayout layout{.logits = placements(logits), .rows = {}};
  for (size_t m = 0; m < layout.logits.size(); ++m) {
    auto& placement = layout.logits[m];
    const bool of_rows = placement.is_shard(0) || placement.is_shard(1);
    const bool of_columns = placement.is_shard(2) && layout.vocab_dim < 0;
    if (!of_rows && !of_columns) placement = Replicate();
    if (of_columns) layout.vocab_dim = static_cast<int64_t>(m);
    layout.rows.push_back(of_rows ? placement : Replicate());
  }
  return layout;
}

// Every rank has all ids, so that a wrong id is an error on all ranks without communication.
void check_ids_of_mesh(const at::Tensor& ids, int64_t vocabulary) {
  const int64_t wrong = first_wrong_label(ids, vocabulary);
  if (wrong < 0) return;
  const int64_t row = wrong / ids.size(1), column = wrong % ids.size(1);
  raise(ErrorKind::kShape,
        "[kernels.get_logprobs_from_vocab_parallel_logits] row {}, token {}: found id {}, wanted one of the {} ids, or "
        "{}",
        row, column + 1, ids[row][column].item<int64_t>(), vocabulary, kIgnoredLabel);
}

// Returns the position in the sequence of each token of the logits, on the CPU; undefined if the tokens are in the
// order of the sequence.
at::Tensor order_of(const at::Tensor& logits, const LogprobOptions& options) {
  if (!options.seq_index.defined()) return {};
  const auto& names = device_mesh(logits)->dim_names();
  TESSERA_CHECK(
      std::ranges::find(names, "cp") != names.end(), ErrorKind::kShape,
      "[kernels.get_logprobs_from_vocab_parallel_logits] found seq_index with logits on the mesh {}, which has "
      "no dim cp. Name the mesh dim of context parallelism cp.",
      device_mesh(logits)->to_string());
  const auto order =
      (is_dtensor(options.seq_index) ? full_tensor(options.seq_index) : options.seq_index).to(at::kCPU, at::kLong);
  const bool fits = order.dim() == 1 && order.numel() == logits.size(1) &&
                    std::get<0>(order.sort()).equal(at::arange(order.numel(), at::kLong));
  TESSERA_CHECK(fits, ErrorKind::kShape,
                "[kernels.get_logprobs_from_vocab_parallel_logits] found seq_index {}, wanted a permutation of the "
                "positions of {} tokens",
                c10::str(order.sizes()), logits.size(1));
  return order;
}

// Targets are computed from the whole ids in sequence order (the next id of the sequence may be on another rank),
// brought to the order of the logits and sharded as the logits' rows. COLLECTIVE over the mesh.
at::Tensor logprobs_of_dtensor(const at::Tensor& sharded_logits, const at::Tensor& ids, const LogprobOptions& options) {
  const MeshPtr mesh = device_mesh(sharded_logits);
  const auto layout = layout_of(sharded_logits);
  const int64_t vocabulary = sharded_logits.size(2);
  const auto logits = redistribute(sharded_logits, layout.logits);
  auto whole_ids = is_dtensor(ids) ? full_tensor(ids) : ids;
  const auto order = order_of(sharded_logits, options);
  const auto back = order.defined() ? order.argsort().to(whole_ids.device()) : order;
  if (order.defined() && is_dtensor(ids)) whole_ids = whole_ids.index_select(1, back);
  auto next = detail::next_token_ids(whole_ids);
  check_ids_of_mesh(next, vocabulary);
  if (order.defined()) next = next.index_select(1, order.to(next.device()));
  const auto target = distribute_tensor(next, mesh, layout.rows, std::nullopt);
  const auto part = vocab_shard_of(*mesh, layout.vocab_dim, vocabulary);
  const auto own = logprobs_of(to_local(logits), to_local(target), part, options, !c10::GradMode::is_enabled());
  const auto whole = from_local(own, mesh, layout.rows,
                                FromLocalOptions::contiguous({sharded_logits.size(0), sharded_logits.size(1)}));
  if (order.defined()) return without_last(full_tensor(whole).index_select(1, back.to(sharded_logits.device())));
  return is_dtensor(ids) ? without_last(whole) : without_last(full_tensor(whole));
}

// ---- context parallelism over a group ----

// Returns the layout of a sequence of which this rank holds the logits of `own` tokens; `tokens` is the number of
// targets. The sequence may be longer than the targets if its length is a multiple of 2 * ranks: its last tokens are
// then padding. COLLECTIVE over the group.
ContextLayout layout_of_logits(comm::Group& group, int64_t own, int64_t tokens, const at::Device& device) {
  const auto lengths = detail::tokens_of_ranks(group, own, device);
  const auto layout = detail::balanced_layout("from_parallel_logits_to_logprobs", lengths);
  const bool padded = layout.tokens() > tokens && layout.tokens() % (2 * layout.ranks()) == 0;
  TESSERA_CHECK(layout.tokens() == tokens || padded, ErrorKind::kShape,
                "[kernels.from_parallel_logits_to_logprobs] the ranks of {} hold logits of {} tokens together and {} "
                "targets each: wanted as many tokens as targets, or a longer padded sequence whose length is a "
                "multiple of {}",
                group.name(), layout.tokens(), tokens, 2 * layout.ranks());
  return layout;
}

at::Tensor logprobs_over_context_ranks(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                                       const LogprobOptions& options, bool inference_only) {
  TESSERA_CHECK(
      logits.dim() == 3 && target.dim() == 2 && target.scalar_type() == at::kLong && target.size(0) == logits.size(0),
      ErrorKind::kShape,
      "[kernels.from_parallel_logits_to_logprobs] found logits {} and {} ids {}: wanted [B, own, V] "
      "and int64 [B, S]",
      c10::str(logits.sizes()), c10::toString(target.scalar_type()), c10::str(target.sizes()));
  auto& group = *options.cp_group;
  const int64_t tokens = target.size(1);
  const auto layout = layout_of_logits(group, logits.size(1), tokens, logits.device());
  auto next = at::full({target.size(0), layout.tokens()}, kIgnoredLabel, target.options());
  next.narrow(1, 0, tokens).copy_(detail::next_token_ids(target));
  const auto own = logprobs_of(logits, layout.shard(next, 1, group.rank()), part, options, inference_only);
  return without_last(layout.unshard(options.cp_group, own, 1).narrow(1, 0, tokens));
}

// ---- packed sequences ----

constexpr const char* kPackedVerb = "from_parallel_logits_to_logprobs_packed_sequences";

// Checks the shapes and returns T, the number of tokens of the whole row; the logits hold T / ranks of them.
int64_t check_packed(const at::Tensor& logits, const at::Tensor& target, int64_t ranks, bool rolled) {
  if (ranks == 1) check_next_tokens(kPackedVerb, logits.sizes(), target);
  const int64_t own = logits.dim() == 3 ? logits.size(1) : 0, targets = rolled ? own : own * ranks;
  TESSERA_CHECK(own > 0 && logits.size(0) == 1 && target.scalar_type() == at::kLong && target.dim() == 2 &&
                    target.size(0) == 1 && target.size(1) == targets,
                ErrorKind::kShape,
                "[kernels.{}] found logits {} and {} ids {}: wanted [1, T / {}, V] and int64 [1, {}]", kPackedVerb,
                c10::str(logits.sizes()), c10::toString(target.scalar_type()), c10::str(target.sizes()), ranks,
                targets);
  return own * ranks;
}

struct PackedSequences {
  int64_t tokens = 0;
  std::vector<int64_t> bounds;
  at::Tensor is_last;  // bool [tokens]: the last token of its sequence
  at::Tensor index;    // int64 [n, width]: the position whose logits predict the token of each result
  at::Tensor missing;  // bool [n, width]: the sequence is too short, the result is 0
};

// Result [i, j] of from_parallel_logits_to_logprobs_packed_sequences() is the log-prob that the logits at position
// bounds[i] + j of the row give to the next token. Sequence i has such results for all its positions but the last, at
// most `width` of them.
PackedSequences packed_sequences(const at::Tensor& cu_seqlens_padded, int64_t unpacked_seqlen, int64_t tokens) {
  const auto cu_seqlens = cu_seqlens_padded.to(at::kCPU, at::kLong).contiguous();
  const int64_t sequences = cu_seqlens.numel() - 1, width = unpacked_seqlen - 1;
  TESSERA_CHECK(cu_seqlens.dim() == 1 && sequences >= 0 && unpacked_seqlen >= 1, ErrorKind::kShape,
                "[kernels.{}] found {}-d cu_seqlens_padded of {} and unpacked_seqlen {}: wanted n + 1 bounds and at "
                "least 1",
                kPackedVerb, cu_seqlens.dim(), cu_seqlens.numel(), unpacked_seqlen);
  const int64_t* bound = cu_seqlens.const_data_ptr<int64_t>();
  PackedSequences out{.tokens = tokens,
                      .bounds = {bound, bound + cu_seqlens.numel()},
                      .is_last = at::zeros({tokens}, at::kBool),
                      .index = at::zeros({sequences, width}, at::kLong),
                      .missing = at::ones({sequences, width}, at::kBool)};
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = bound[i], end = bound[i + 1];
    TESSERA_CHECK(0 <= begin && begin <= end && end <= tokens, ErrorKind::kShape,
                  "[kernels.{}] cu_seqlens_padded: sequence {} is [{}, {}), wanted within the {} tokens", kPackedVerb,
                  i, begin, end, tokens);
    if (begin == end) continue;
    out.is_last[end - 1].fill_(true);
    const int64_t kept = std::min(end - begin - 1, width);
    out.index[i].narrow(0, 0, kept).copy_(at::arange(begin, begin + kept, at::kLong));
    out.missing[i].narrow(0, 0, kept).fill_(false);
  }
  return out;
}

// Returns the positions in the whole row of the tokens that `rank` holds, int64 [T / ranks]. Each sequence is sharded
// separately.
at::Tensor packed_positions(const PackedSequences& packed, int64_t ranks, int64_t rank) {
  const auto& bounds = packed.bounds;
  TESSERA_CHECK(
      bounds.front() == 0 && bounds.back() == packed.tokens, ErrorKind::kShape,
      "[kernels.{}] cu_seqlens_padded goes from {} to {}, wanted from 0 to all {} tokens: the tokens are sharded over "
      "ranks",
      kPackedVerb, bounds.front(), bounds.back(), packed.tokens);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    const int64_t tokens = bounds[i + 1] - bounds[i];
    TESSERA_CHECK(
        tokens % (2 * ranks) == 0, ErrorKind::kShape,
        "[kernels.{}] cu_seqlens_padded: sequence {} has {} tokens, wanted a multiple of {}, twice the number "
        "of ranks that shard it",
        kPackedVerb, i, tokens, 2 * ranks);
    parts.push_back(ContextLayout(tokens, ranks).positions(rank).add_(bounds[i]));
  }
  return at::cat(parts);
}

}  // namespace

at::Tensor get_logprobs_from_vocab_parallel_logits(const at::Tensor& vocab_parallel_logits, const at::Tensor& input_ids,
                                                   const LogprobOptions& options) {
  check_next_tokens("get_logprobs_from_vocab_parallel_logits", vocab_parallel_logits.sizes(), input_ids);
  TESSERA_CHECK(!is_dtensor(vocab_parallel_logits) || !options.cp_group, ErrorKind::kShape,
                "[kernels.get_logprobs_from_vocab_parallel_logits] found cp_group with DTensor logits, wanted plain "
                "logits with it. Set seq_index instead, or pass this rank's columns to "
                "from_parallel_logits_to_logprobs.");
  if (is_dtensor(vocab_parallel_logits)) return logprobs_of_dtensor(vocab_parallel_logits, input_ids, options);
  return from_parallel_logits_to_logprobs(vocab_parallel_logits, input_ids,
                                          {.start = 0, .end = vocab_parallel_logits.size(2)}, options);
}

at::Tensor from_parallel_logits_to_logprobs(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                                            const VocabShard& part, const LogprobOptions& options,
                                            bool inference_only) {
  TESSERA_CHECK(!options.seq_index.defined(), ErrorKind::kShape,
                "[kernels.from_parallel_logits_to_logprobs] found seq_index with plain logits, wanted DTensor logits "
                "with it. Set cp_group instead, or pass a DTensor to get_logprobs_from_vocab_parallel_logits.");
  if (options.cp_group && options.cp_group->size() > 1) {
    return logprobs_over_context_ranks(vocab_parallel_logits, target, part, options, inference_only);
  }
  check_next_tokens("from_parallel_logits_to_logprobs", vocab_parallel_logits.sizes(), target);
  return without_last(
      logprobs_of(vocab_parallel_logits, detail::next_token_ids(target), part, options, inference_only));
}

at::Tensor from_parallel_logits_to_logprobs_packed_sequences(const at::Tensor& vocab_parallel_logits,
                                                             const at::Tensor& target,
                                                             const at::Tensor& cu_seqlens_padded,
                                                             int64_t unpacked_seqlen, const VocabShard& part,
                                                             const PackedLogprobOptions& options) {
  const int64_t ranks = options.cp_group ? options.cp_group->size() : 1;
  const auto packed =
      packed_sequences(cu_seqlens_padded, unpacked_seqlen,
                       check_packed(vocab_parallel_logits, target, ranks, options.target_is_pre_rolled));
  // This rank's targets. The last token of a sequence has no target: the next token belongs to another sequence.
  auto next = options.target_is_pre_rolled ? target : detail::next_token_ids(target);
  std::vector<at::Tensor> order;
  if (ranks > 1) {
    for (int64_t rank = 0; rank < ranks; ++rank) order.push_back(packed_positions(packed, ranks, rank));
    const auto& own = order[static_cast<size_t>(options.cp_group->rank())];
    if (!options.target_is_pre_rolled) next = next.index_select(1, own.to(next.device()));
    next = next.masked_fill(packed.is_last.index_select(0, own).to(next.device()), kIgnoredLabel);
  } else {
    next = next.masked_fill(packed.is_last.to(next.device()), kIgnoredLabel);
  }
  auto logprobs = logprobs_of(vocab_parallel_logits, next, part,
                              {.chunk_size = options.chunk_size, .sampling_params = options.sampling_params},
                              options.inference_only);
  const auto device = logprobs.device();
  if (ranks > 1) {
    // unshard() returns the tokens of rank 0, then those of rank 1, and so on. The inverse of `order` brings them to
    // the order of the row.
    const ContextLayout by_rank(packed.tokens, ranks, ContextLayout::Order::kContiguous);
    logprobs = by_rank.unshard(options.cp_group, logprobs, 1).index_select(1, at::cat(order).argsort().to(device));
  }
  return logprobs.squeeze(0)
      .index_select(0, packed.index.flatten().to(device))
      .view(packed.index.sizes())
      .masked_fill(packed.missing.to(device), 0);
}

}  // namespace tessera::kernels
