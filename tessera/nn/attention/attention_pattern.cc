#include "tessera/nn/attention/attention_pattern.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/attention/causal_attention.h"
#include "tessera/kernels/attention/checkpointed_attention.h"
#include "tessera/kernels/attention/flash_attention.h"
#include "tessera/kernels/attention/head_groups.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/mesh/host_memory.h"
#include "tessera/nn/attention/attention_mask.h"
#include "tessera/nn/attention/context_attention.h"
#include "tessera/nn/attention/context_parallel_guard.h"
#include "tessera/nn/attention/local_heads.h"

namespace tessera::nn {
namespace {

// A document that is longer than the sliding window is split into pieces of the window's length, clamped to these
// bounds. Shorter pieces cost more kernel calls, longer pieces compute more scores outside the window.
constexpr int64_t kMinPiece = 128, kMaxPiece = 1024;

using Kind = AttentionPattern::Kind;
using Pieces = std::vector<AttentionPattern::Piece>;

std::vector<std::vector<DocumentRun>> runs_of_rows(const AttentionPatternOptions& pattern_options) {
  if (!pattern_options.document_ids.defined()) {
    return std::vector<std::vector<DocumentRun>>(static_cast<size_t>(pattern_options.rows),
                                                 std::vector<DocumentRun>{{0, pattern_options.tokens}});
  }
  const auto& ids_tensor = pattern_options.document_ids;
  TESSERA_CHECK(
      pattern_options.cached == 0, ErrorKind::kShape,
      "[nn.attention] found document ids with {} cached tokens, wanted none: a cache holds one document per row",
      pattern_options.cached);
  TESSERA_CHECK(ids_tensor.dim() == 2 && ids_tensor.size(0) == pattern_options.rows &&
                    ids_tensor.size(1) == pattern_options.tokens && ids_tensor.scalar_type() == at::kLong,
                ErrorKind::kShape, "[nn.attention] found {} document ids of {}, wanted int64 [{}, {}]",
                ids_tensor.numel(), c10::toString(ids_tensor.scalar_type()), pattern_options.rows,
                pattern_options.tokens);
  const auto ids = (is_dtensor(ids_tensor) ? full_tensor(ids_tensor) : ids_tensor).cpu().contiguous();
  std::vector<std::vector<DocumentRun>> rows;
  for (int64_t row = 0; row < pattern_options.rows; ++row) {
    rows.push_back(document_runs(ids.const_data_ptr<int64_t>() + row * pattern_options.tokens, pattern_options.tokens,
                                 row, "nn.attention"));
  }
  return rows;
}

// Whether a row is one document, or one document and then padding, and the document is not longer than the window.
bool is_plain_causal(const std::vector<DocumentRun>& row, int64_t window) {
  const bool one = row.empty() || (row[0].id >= 0 && (row.size() == 1 || (row.size() == 2 && row[1].id < 0)));
  return one && (row.empty() || window == 0 || row[0].tokens <= window);
}

// Adds the pieces of one document. A document that is not longer than the window is one causal piece. A longer one is
// split into pieces of window_piece tokens. The queries of a piece also see keys of the `reach` pieces before it, which
// together have at least window - 1 tokens.
void add_document(Pieces& pieces, int64_t tokens, const AttentionPattern& pattern) {
  if (pattern.sliding_window == 0 || tokens <= pattern.sliding_window) {
    pieces.push_back({.tokens = tokens});
    return;
  }
  const int64_t piece = pattern.window_piece, reach = (pattern.sliding_window - 1 + piece - 1) / piece;
  for (int64_t begin = 0; begin < tokens; begin += piece) {
    pieces.push_back({Kind::kWindow, std::min(piece, tokens - begin), std::min(reach, begin / piece)});
  }
}

// Returns the position of the first key that each token sees. For padding at position t it is t + 1, so padding sees no
// key.
at::Tensor first_keys(const std::vector<std::vector<DocumentRun>>& rows,
                      const AttentionPatternOptions& pattern_options) {
  auto first_key = at::empty({pattern_options.rows, pattern_options.tokens}, at::kLong);
  auto* to = first_key.mutable_data_ptr<int64_t>();
  for (const auto& row : rows) {
    int64_t begin = 0;
    for (const auto& run : row) {
      const int64_t end = begin + run.tokens, window = pattern_options.sliding_window;
      for (int64_t t = begin; t < end; ++t) {
        *to++ = run.id < 0 ? t + 1 : window > 0 ? std::max(begin, t - window + 1) : begin;
      }
      begin = end;
    }
  }
  return first_key;
}

// For float32 tensors the kernels for several documents pad each document to the length of the longest one. So for each
// head they store (number of documents) * (length of the longest document) log-sums of the softmax. If this is more
// than kMaxSums log-sums per token, attend() computes piece by piece instead.
constexpr int64_t kMaxSums = 8;

// Returns the document lengths for flash attention; empty if the kernels would store too many log-sums (kMaxSums). With
// `fixed_sizes`, padding is a document too, so its results are not zeros, and the list is filled up with documents
// without tokens.
AttentionPattern::Documents lengths_of_documents(const std::vector<std::vector<DocumentRun>>& rows,
                                                 const at::TensorOptions& options, FixedDocumentSizes* fixed_sizes) {
  AttentionPattern::Documents out{.runs = {0}, .has_fixed_sizes = fixed_sizes != nullptr};
  std::vector<int32_t> begins = {0};
  for (const auto& row : rows) {
    for (const auto& run : row) {
      const bool documents_last = out.runs.size() % 2 == 1, is_document = run.id >= 0 || out.has_fixed_sizes;
      if (documents_last != is_document) out.runs.push_back(0);
      out.runs.back() += run.tokens;
      if (!is_document) continue;
      begins.push_back(begins.back() + static_cast<int32_t>(run.tokens));
      out.longest = std::max(out.longest, run.tokens);
    }
  }
  const int64_t documents = static_cast<int64_t>(begins.size()) - 1;
  if (fixed_sizes != nullptr) {
    while (fixed_sizes->documents < documents) fixed_sizes->documents *= 2;
    while (fixed_sizes->longest < out.longest) fixed_sizes->longest *= 2;
    out.longest = fixed_sizes->longest;
    begins.resize(static_cast<size_t>(fixed_sizes->documents) + 1,
                  begins.back());  // unused places: documents without tokens
  } else if (out.longest == 0 ||
             (options.dtype() == at::kFloat && documents * out.longest > kMaxSums * begins.back())) {
    return {};
  }
  out.begins = to_device_async(options.device(), at::tensor(begins, at::kInt));
  return out;
}

// Attention with softcap, which fused kernels do not support. Blocks of kMaxPiece queries limit the memory for the
// scores.
at::Tensor capped_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                            const std::optional<at::Tensor>& mask, const AttentionScoreOptions& scores) {
  const auto keys = kernels::repeat_heads(k, /*dim=*/1, q.size(1)).transpose(2, 3),
             values = kernels::repeat_heads(v, /*dim=*/1, q.size(1));
  const double scale = scores.scale > 0 ? scores.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
  std::vector<at::Tensor> results;
  for (int64_t begin = 0; begin < q.size(2); begin += kMaxPiece) {
    const int64_t count = std::min(kMaxPiece, q.size(2) - begin), seen = causal ? begin + count : k.size(2);
    auto score = q.narrow(2, begin, count).matmul(keys.narrow(3, 0, seen)).mul(scale / scores.softcap);
    score = score.tanh().mul(scores.softcap);
    if (causal) {
      score =
          score + replicate_like(visible_mask({.first_query = begin, .queries = count, .keys = seen}, q.options()), q);
    }
    if (mask) score = score + replicate_like(mask->narrow(0, begin, count), q);
    results.push_back(at::softmax(score, -1, kernels::wide_type(q.scalar_type()))
                          .to(q.scalar_type())
                          .matmul(values.narrow(2, 0, seen)));
  }
  return results.size() == 1 ? results[0] : at::cat(results, 2);
}

at::Tensor scaled_dot_product(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                              std::optional<at::Tensor> mask, const AttentionScoreOptions& scores) {
  if (scores.softcap > 0) return capped_attention(q, k, v, causal, mask, scores);
  if (mask) mask = replicate_like(*mask, q);
  const auto scale = scores.scale > 0 ? std::optional<double>(scores.scale) : std::nullopt;
  if (kernels::caches_attention(q)) {
    return kernels::checkpointed_attention(q, k, v, {.causal = causal && q.size(2) > 1, .mask = mask, .scale = scale});
  }
  return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, causal && q.size(2) > 1, scale,
                                          /*enable_gqa=*/q.size(1) != k.size(1));
}

// Concatenates all rows of the batch into one row and splits this row into the pieces of the pattern
// (AttentionPattern::Piece: a document, a part of a long document, or padding). split_with_sizes is used because its
// backward is one concatenation.
std::vector<at::Tensor> split_into_pieces(const at::Tensor& tensor, const Pieces& pieces) {
  auto flat = tensor;
  if (tensor.size(0) != 1) {
    flat = tensor.transpose(1, 2).reshape({1, -1, tensor.size(1), tensor.size(3)}).transpose(1, 2);
  }
  std::vector<int64_t> lengths;
  for (const auto& piece : pieces) lengths.push_back(piece.tokens);
  return at::split_with_sizes(flat, lengths, 2);
}

at::Tensor concatenated_pieces(const std::vector<at::Tensor>& parts, size_t last, int64_t earlier) {
  if (earlier == 0) return parts[last];
  const auto end = parts.begin() + static_cast<std::ptrdiff_t>(last) + 1;
  return at::cat(std::vector<at::Tensor>(end - earlier - 1, end), 2);
}

// Runs one attention per piece. A kWindow piece takes a slice of window_mask: as many rows as the piece has tokens, and
// the columns of its own keys and of the keys of its `earlier` pieces.
at::Tensor attend_pieces(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                         const AttentionScoreOptions& scores) {
  const auto queries = split_into_pieces(q, pattern.pieces), keys = split_into_pieces(k, pattern.pieces),
             values = split_into_pieces(v, pattern.pieces);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < queries.size(); ++i) {
    const auto& piece = pattern.pieces[i];
    at::Tensor result;
    if (piece.kind == Kind::kPadding) {
      result = at::zeros_like(queries[i]);
    } else if (piece.kind == Kind::kCausal) {
      result = scaled_dot_product(queries[i], keys[i], values[i], /*causal=*/true, std::nullopt, scores);
    } else {
      const int64_t own = pattern.window_mask.size(1) - pattern.window_piece;  // column of the piece's first own key
      const int64_t before = piece.earlier * pattern.window_piece;
      const auto mask = pattern.window_mask.narrow(0, 0, piece.tokens).narrow(1, own - before, before + piece.tokens);
      result = scaled_dot_product(queries[i], concatenated_pieces(keys, i, piece.earlier),
                                  concatenated_pieces(values, i, piece.earlier),
                                  /*causal=*/false, mask, scores);
    }
    results.push_back(result.transpose(1, 2));
  }
  return at::cat(results, 1).view({q.size(0), q.size(2), q.size(1), v.size(3)}).transpose(1, 2);
}

// Returns the tokens of all rows without padding, [N, heads, d]. `runs` has the lengths of runs of document tokens and
// of padding, alternating.
at::Tensor tokens_of_documents(const at::Tensor& heads, const std::vector<int64_t>& runs) {
  const auto tokens = heads.transpose(1, 2).reshape({-1, heads.size(1), heads.size(3)});
  if (runs.size() == 1) return tokens;
  const auto all = tokens.split_with_sizes(runs);
  std::vector<at::Tensor> real;
  for (size_t i = 0; i < all.size(); i += 2) real.push_back(all[i]);
  return at::cat(real);
}

// The inverse of tokens_of_documents: inserts zeros for padding.
at::Tensor with_padding(const at::Tensor& tokens, const std::vector<int64_t>& runs) {
  if (runs.size() == 1) return tokens;
  std::vector<at::Tensor> all;
  for (int64_t i = 0, begin = 0; i < static_cast<int64_t>(runs.size()); ++i) {
    const int64_t count = runs[static_cast<size_t>(i)];
    all.push_back(i % 2 == 0 ? tokens.narrow(0, begin, count)
                             : at::zeros({count, tokens.size(1), tokens.size(2)}, tokens.options()));
    if (i % 2 == 0) begin += count;
  }
  return at::cat(all);
}

at::Tensor attend_documents(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionPattern& pattern, const AttentionScoreOptions& scores) {
  const auto& [begins, longest, runs, has_fixed_sizes] = pattern.documents;
  const auto y = kernels::flash_attention(
      tokens_of_documents(q, runs), tokens_of_documents(k, runs), tokens_of_documents(v, runs),
      {.begins = begins, .longest = longest, .window = pattern.sliding_window, .scale = scores.scale});
  return with_padding(y, runs).view({q.size(0), q.size(2), q.size(1), v.size(3)}).transpose(1, 2);
}

// Attention of queries that follow cached keys, in blocks of kMaxPiece queries. Each block reads only the keys that are
// in the window of one of its queries.
at::Tensor attend_cached(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
                         const AttentionScoreOptions& scores) {
  const int64_t tokens = q.size(2), cached = k.size(2) - tokens;
  std::vector<at::Tensor> results;
  for (int64_t begin = 0; begin < tokens; begin += kMaxPiece) {
    const int64_t count = std::min(kMaxPiece, tokens - begin), end = cached + begin + count;
    const int64_t first = window > 0 ? std::max<int64_t>(0, end - count - window + 1) : 0;
    const auto mask =
        count == 1 ? std::optional<at::Tensor>()
                   : visible_mask(
                         {.first_query = end - count - first, .queries = count, .keys = end - first, .window = window},
                         q.options());
    results.push_back(scaled_dot_product(q.narrow(2, begin, count), k.narrow(2, first, end - first),
                                         v.narrow(2, first, end - first), /*causal=*/false, mask, scores));
  }
  return results.size() == 1 ? results[0] : at::cat(results, 2);
}

}  // namespace

AttentionPattern attention_pattern(const AttentionPatternOptions& pattern_options, const at::TensorOptions& options) {
  AttentionPattern pattern{.sliding_window = pattern_options.sliding_window};
  if (pattern_options.context) {
    TESSERA_CHECK(pattern_options.cached == 0, ErrorKind::kShape,
                  "[nn.attention] found {} cached tokens under context parallelism, wanted none: a KV cache is on one "
                  "rank. Generate with a model that is not context parallel.",
                  pattern_options.cached);
    pattern.context =
        context_pattern(pattern_options.context, {.sliding_window = pattern_options.sliding_window}, options);
    return pattern;
  }
  if (const auto* scope = ContextParallelGuard::current()) {
    TESSERA_CHECK(
        !pattern_options.document_ids.defined() && pattern_options.cached == 0, ErrorKind::kShape,
        "[nn.attention] found document ids or {} cached tokens inside a context_parallel scope, which supports "
        "one document per row. Use apply_context_parallel.",
        pattern_options.cached);
    pattern.context = scope->pattern(pattern_options.rows, {.sliding_window = pattern_options.sliding_window}, options);
    return pattern;
  }
  const auto rows = runs_of_rows(pattern_options);
  const auto plain = [&](const auto& row) { return is_plain_causal(row, pattern_options.sliding_window); };
  // For plain causal rows, and for queries that follow cached keys, attend() needs no pieces, first_key or document
  // lengths.
  if (pattern_options.cached > 0 || std::ranges::all_of(rows, plain)) return pattern;
  if (options.device().is_cpu()) pattern.first_key = first_keys(rows, pattern_options);
  if (kernels::has_flash_attention(options.device(), c10::typeMetaToScalarType(options.dtype()))) {
    // In float32 the memory of the flash attention kernels grows with (number of documents) * (length of the longest
    // one), see kMaxSums. Padding the list to pattern_options.fixed_sizes would increase both factors, so fixed_sizes
    // is not used in float32: the document list of each batch has the sizes of that batch.
    pattern.documents =
        lengths_of_documents(rows, options, options.dtype() != at::kFloat ? pattern_options.fixed_sizes : nullptr);
  }
  // Kernels that read AttentionPattern::first_key or AttentionPattern::documents do not support every device and every
  // call. In all other cases attend() computes one piece after another: `pieces` lists them, and `window_mask` is the
  // one mask for all pieces of kind kWindow.
  pattern.window_piece = std::clamp(pattern_options.sliding_window, kMinPiece, kMaxPiece);
  int64_t max_earlier = -1;
  for (const auto& row : rows) {
    for (const auto& run : row) {
      if (run.id < 0) {
        pattern.pieces.push_back({Kind::kPadding, run.tokens, 0});
      } else {
        add_document(pattern.pieces, run.tokens, pattern);
      }
    }
  }
  for (const auto& piece : pattern.pieces) {
    if (piece.kind == Kind::kWindow) max_earlier = std::max(max_earlier, piece.earlier);
  }
  if (max_earlier >= 0) {
    const int64_t before = max_earlier * pattern.window_piece;
    pattern.window_mask = visible_mask({.first_query = before,
                                        .queries = pattern.window_piece,
                                        .keys = before + pattern.window_piece,
                                        .window = pattern_options.sliding_window},
                                       options);
  }
  return pattern;
}

// Selects the first kernel that supports the call: context parallelism, cached keys, the CPU's causal kernel, flash
// attention over document lengths, and else attention piece by piece.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                  const AttentionScoreOptions& scores) {
  if (pattern.context) return attend_context(q, k, v, pattern.context, scores);
  if (const auto* scope = ContextParallelGuard::current()) return scope->attend(q, k, v, pattern, scores);
  if (k.size(2) > q.size(2)) return attend_cached(q, k, v, pattern.sliding_window, scores);
  const bool says_first_keys = pattern.pieces.empty() || pattern.first_key.defined();
  if (scores.softcap == 0 && says_first_keys && kernels::supports_causal_attention_loops(q, k, v)) {
    const auto scale = scores.scale > 0 ? std::optional<double>(scores.scale) : std::nullopt;
    return kernels::causal_attention(q, k, v, {.first_key = pattern.first_key, .scale = scale});
  }
  if (pattern.pieces.empty()) return scaled_dot_product(q, k, v, /*causal=*/true, std::nullopt, scores);
  if (scores.softcap == 0 && pattern.documents.begins.defined() && kernels::supports_flash_attention(q, k, v)) {
    if (!is_dtensor(q)) return attend_documents(q, k, v, pattern, scores);
    // The document lengths describe all rows of the batch, so dim 0 (rows) must not be sharded.
    if (has_local_heads(q, k, v) && local_tensor_of(q).size(0) == q.size(0)) {
      return run_on_local_heads(q, k, v,
                                [&](const at::Tensor& own_q, const at::Tensor& own_k, const at::Tensor& own_v) {
                                  return attend_documents(own_q, own_k, own_v, pattern, scores);
                                });
    }
  }
  TESSERA_CHECK(
      !pattern.documents.has_fixed_sizes, ErrorKind::kInternal,
      "[nn.attention] found FixedDocumentSizes for heads of {} elements of {}, wanted heads that the kernels for "
      "document lengths support",
      q.size(3), c10::toString(q.scalar_type()));
  return attend_pieces(q, k, v, pattern, scores);
}

}  // namespace tessera::nn
