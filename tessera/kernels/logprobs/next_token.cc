#include "tessera/kernels/logprobs/next_token.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/detail/wrong_label.h"
#include "tessera/kernels/ignored_label.h"
#include "tessera/kernels/logprobs/detail/id_places.h"
#include "tessera/kernels/logprobs/logprobs.h"

namespace tessera {
namespace {

at::Tensor logprobs_of(const at::Tensor& logits, const at::Tensor& target, const VocabPart& part,
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

// How logits are to lie, and which mesh dim cuts their vocabulary (-1: none).
struct LogitLayout {
  Placements logits;
  Placements rows;  // of what has one value a row
  int64_t vocab_dim = -1;
};

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

// All ranks have all ids, so an id that is wrong is an error of all.
void check_ids_of_mesh(const at::Tensor& ids, int64_t vocabulary) {
  const int64_t wrong = detail::first_wrong_label(ids, vocabulary);
  if (wrong < 0) return;
  const int64_t row = wrong / ids.size(1), column = wrong % ids.size(1);
  raise(ErrorKind::kShape,
        "[kernels.get_logprobs_from_vocab_parallel_logits] row {}, token {}: found id {}, wanted one of the {} ids, or "
        "{}",
        row, column + 1, ids[row][column].item<int64_t>(), vocabulary, kIgnoredLabel);
}

at::Tensor logprobs_of_mesh(const at::Tensor& given, const at::Tensor& ids, const LogprobOptions& options) {
  const MeshPtr mesh = device_mesh(given);
  const auto layout = layout_of(given);
  const int64_t vocabulary = given.size(2);
  const auto logits = redistribute(given, layout.logits);
  const auto next = detail::following_ids(is_dtensor(ids) ? full_tensor(ids) : ids);
  check_ids_of_mesh(next, vocabulary);
  const auto target = distribute_tensor(next, mesh, layout.rows, std::nullopt);
  const auto part = part_over(*mesh, layout.vocab_dim, vocabulary);
  const auto own = logprobs_of(to_local(logits), to_local(target), part, options, !c10::GradMode::is_enabled());
  const auto whole = from_local(own, mesh, layout.rows, FromLocalOptions::contiguous({given.size(0), given.size(1)}));
  return is_dtensor(ids) ? without_last(whole) : without_last(full_tensor(whole));
}

}  // namespace

at::Tensor get_logprobs_from_vocab_parallel_logits(const at::Tensor& vocab_parallel_logits, const at::Tensor& input_ids,
                                                   const LogprobOptions& options) {
  check_next_tokens("get_logprobs_from_vocab_parallel_logits", vocab_parallel_logits.sizes(), input_ids);
  if (is_dtensor(vocab_parallel_logits)) return logprobs_of_mesh(vocab_parallel_logits, input_ids, options);
  return from_parallel_logits_to_logprobs(vocab_parallel_logits, input_ids,
                                          {.start = 0, .end = vocab_parallel_logits.size(2)}, options);
}

at::Tensor from_parallel_logits_to_logprobs(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                                            const VocabPart& part, const LogprobOptions& options, bool inference_only) {
  check_next_tokens("from_parallel_logits_to_logprobs", vocab_parallel_logits.sizes(), target);
  return without_last(logprobs_of(vocab_parallel_logits, detail::following_ids(target), part, options, inference_only));
}

at::Tensor from_parallel_logits_to_logprobs_packed_sequences(const at::Tensor& vocab_parallel_logits,
                                                             const at::Tensor& target,
                                                             const at::Tensor& cu_seqlens_padded,
                                                             int64_t unpacked_seqlen, const VocabPart& part,
                                                             const PackedLogprobOptions& options) {
  constexpr const char* kVerb = "from_parallel_logits_to_logprobs_packed_sequences";
  check_next_tokens(kVerb, vocab_parallel_logits.sizes(), target);
  const auto bounds = cu_seqlens_padded.to(at::kCPU, at::kLong).contiguous();
  const int64_t tokens = target.size(1), sequences = bounds.numel() - 1;
  TESSERA_CHECK(
      target.size(0) == 1 && bounds.dim() == 1 && sequences >= 0 && unpacked_seqlen >= 1, ErrorKind::kShape,
      "[kernels.{}] found {} rows, {}-d cu_seqlens_padded of {} and unpacked_seqlen {}: wanted one row, n + 1 "
      "bounds and at least 1",
      kVerb, target.size(0), bounds.dim(), bounds.numel(), unpacked_seqlen);
  const int64_t* bound = bounds.const_data_ptr<int64_t>();
  auto next = options.target_is_pre_rolled ? target.clone() : detail::following_ids(target);
  const int64_t width = unpacked_seqlen - 1;
  const auto index = at::zeros({sequences, width}, at::kLong);
  const auto missing = at::ones({sequences, width}, at::kBool);
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = bound[i], end = bound[i + 1];
    TESSERA_CHECK(0 <= begin && begin <= end && end <= tokens, ErrorKind::kShape,
                  "[kernels.{}] cu_seqlens_padded: sequence {} is [{}, {}), wanted within the {} tokens", kVerb, i,
                  begin, end, tokens);
    if (begin == end) continue;
    next.select(1, end - 1).fill_(kIgnoredLabel);  // what follows is another sequence
    const int64_t kept = std::min(end - begin - 1, width);
    index[i].narrow(0, 0, kept).copy_(at::arange(begin, begin + kept, at::kLong));
    missing[i].narrow(0, 0, kept).fill_(false);
  }
  const auto logprobs = logprobs_of(vocab_parallel_logits, next, part,
                                    {.chunk_size = options.chunk_size, .sampling_params = options.sampling_params},
                                    options.inference_only);
  const auto device = logprobs.device();
  return logprobs.squeeze(0)
      .index_select(0, index.flatten().to(device))
      .view({sequences, width})
      .masked_fill(missing.to(device), 0);
}

}  // namespace tessera
