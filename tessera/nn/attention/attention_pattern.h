// Describes which keys each token sees in self-attention, and computes the attention. Both take memory linear in the
// number of tokens.
//
//   const AttentionPattern pattern = attention_pattern({.rows = B, .tokens = T, .document_ids = ids}, x.options());
//   at::Tensor y = attend(q, k, v, pattern);     // q [B, H, T, d], k and v [B, G, cached + T, d]: [B, H, T, d]
//
// A token sees itself and earlier tokens of its document; with a sliding window at most sliding_window - 1 earlier
// tokens. One document per row, with or without padding behind it, is plain causal attention. For other patterns the
// rows are concatenated and split into pieces. A piece is a whole document, or a part of a document that is longer than
// the window; the queries of such a part also see the keys of the earlier parts that the window reaches.
// AttentionPattern is a value type. It is made once per forward and shared by all layers; thread-safe.
//
// These kernels compute whole documents and do not need pieces: kernels/attention/causal_attention.h on a CPU,
// kernels/attention/flash_attention.h on an accelerator (16 bits and float32).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::nn {

struct ContextPattern;
struct ContextSequence;

struct AttentionPattern {
  enum class Kind : uint8_t { kCausal, kWindow, kPadding };
  struct Piece {
    Kind kind = Kind::kCausal;
    int64_t tokens = 0;
    int64_t earlier = 0;  // number of earlier pieces whose keys it also sees
  };
  std::vector<Piece> pieces{};  // of the concatenated rows; empty: plain causal
  int64_t sliding_window = 0;
  int64_t window_piece = 0;  // tokens of a full kWindow piece
  // Mask that is added to the scores of a kWindow piece. Its last window_piece columns are the piece's own keys, the
  // columns before them are the keys of earlier pieces.
  at::Tensor window_mask{};
  // The position of the first key that each token sees, int64 [rows, tokens], for the CPU kernel
  // (kernels/attention/causal_attention.h), which reads it in place of `pieces`. Set only on the CPU, and only if
  // `pieces` is not empty.
  at::Tensor first_key{};
  // Document lengths for kernels that read them in place of `pieces` (kernels/attention/flash_attention.h). `begins`
  // are the cumulative lengths of the documents (cu_seqlens), without padding. `runs` are the lengths of alternating
  // runs of document tokens and of padding tokens, document tokens first.
  struct Documents {
    at::Tensor begins{};
    int64_t longest = 0;
    std::vector<int64_t> runs{};
    bool has_fixed_sizes = false;  // laid out with a FixedDocumentSizes; then only `begins` and `longest` are set
  };
  Documents documents{};
  // Set under context parallelism; attend() then ignores all members above.
  std::shared_ptr<const ContextPattern> context{};
};

// Sizes to which the document lengths of every batch are padded, so that every batch launches the same kernels (CUDA
// graphs): a list of `documents` documents, of which the longest has `longest` tokens. Both numbers are powers of two
// and are doubled when a batch needs more. Padding tokens count as a document.
struct FixedDocumentSizes {
  int64_t documents = 16;
  int64_t longest = 128;
};

struct AttentionPatternOptions {
  int64_t rows = 1;
  int64_t tokens = 0;  // of each row in this call
  int64_t cached = 0;  // earlier tokens in the KV cache
  // int64 [rows, tokens]: a run of equal numbers is a document; negative numbers are padding, whose results are not
  // used. Undefined: one document per row.
  at::Tensor document_ids{};
  int64_t sliding_window = 0;  // a token sees itself and window - 1 earlier tokens; 0: all earlier ones
  // Set under context parallelism: describes the rows, whose tokens are sharded over ranks; this rank has `tokens`
  // tokens of each row. The ContextSequence contains the documents of the rows, so document_ids is not read
  // (context_attention.h).
  std::shared_ptr<const ContextSequence> context{};
  // Sizes to which the lists of document lengths are padded; null: no padding. If set, the head size must be one that
  // kernels/attention/flash_attention.h supports, and softcap must be 0. Not owned. Ignored in float32.
  FixedDocumentSizes* fixed_sizes = nullptr;
};

// Makes the AttentionPattern for the rows that `pattern_options` describes. `options` has the dtype and device of the
// queries. The document ids are copied to the host. If they are a DTensor, the call is COLLECTIVE over its mesh. Error
// kShape: ids that are not int64 [rows, tokens], ids together with cached tokens, an id that occurs in two separate
// runs, cached tokens under context parallelism, or ids while a ContextParallelGuard exists.
AttentionPattern attention_pattern(const AttentionPatternOptions& pattern_options, const at::TensorOptions& options);

// How a score is computed from a query and a key, before the softmax.
struct AttentionScoreOptions {
  double scale = 0;  // factor of the product; 0: 1 / sqrt(head_dim)
  // Scores become softcap * tanh(score / softcap); 0: no cap. Fused kernels do not support a softcap; with a softcap,
  // the scores of 1024 queries at a time are stored in memory.
  double softcap = 0;
};

// Scaled dot product attention. With more keys than queries, the first keys are cached keys of earlier tokens. The
// number of query heads may be a multiple of the number of key heads (GQA). Results of padding tokens are zeros if
// pattern.pieces is not empty and pattern.documents.has_fixed_sizes is false, else unspecified. Under context
// parallelism (pattern.context or a ContextParallelGuard) the call is COLLECTIVE over the group.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                  const AttentionScoreOptions& scores = {});

}  // namespace tessera::nn
