// Visibility in self-attention (which token sees which), described and computed in memory linear in the number of
// tokens.
//
//   const AttentionPattern pattern = attention_pattern({.rows = B, .tokens = T, .document_ids = ids}, x.options());
//   at::Tensor y = attend(q, k, v, pattern);     // q [B, H, T, d], k and v [B, G, cached + T, d]: [B, H, T, d]
//
// A token sees itself and earlier tokens of its document; with a sliding window at most sliding_window - 1 earlier
// tokens. One document per row, with or without padding behind it, is plain causal attention. For other patterns the
// rows are concatenated and split into pieces. A piece is a whole document, or a part of a document that is longer than
// the window; such a part also sees as many earlier parts as the window reaches. A value type, made once per forward
// and shared by all layers; thread-safe.
//
// Kernels for whole documents run without pieces: kernels/attention/causal_attention.h on a CPU,
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
  // Added to the scores of a kWindow piece; the last window_piece columns are the piece's own keys
  at::Tensor window_mask{};
  // What `pieces` describes, in the form that the CPU kernel (kernels/attention/causal_attention.h) reads: the first
  // key that each token sees, int64 [rows, tokens]. Set only on the CPU, and only if `pieces` is not empty.
  at::Tensor first_key{};
  // The same visibility for kernels that read document lengths: `begins`, the borders of documents among the tokens
  // that are not padding (kernels/attention/flash_attention.h); `runs`, the lengths of runs of document tokens and of
  // padding, alternating, documents first.
  struct Documents {
    at::Tensor begins{};
    int64_t longest = 0;
    std::vector<int64_t> runs{};
    bool has_fixed_sizes = false;  // laid out with a FixedDocumentSizes; then only `begins` and `longest` are set
  };
  Documents documents{};
  // Set under context parallelism; replaces all members above.
  std::shared_ptr<const ContextPattern> context{};
};

// Fixed sizes for document lengths, so that every batch launches the same kernels (CUDA graphs): each batch has room
// for `documents` documents and a longest one of `longest` tokens. Both are powers of two and grow when a batch needs
// more. Padding counts as a document.
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
  // Set under context parallelism: the sequence of which this rank has `tokens` tokens per row. It already includes the
  // document ids (context_attention.h).
  std::shared_ptr<const ContextSequence> context{};
  // Null: documents keep their own lengths. Otherwise the device's kernels for lengths must support the heads, and
  // there must be no softcap. Not owned. Ignored in float32.
  FixedDocumentSizes* fixed_sizes = nullptr;
};

// `options`: dtype and device of the queries. Reads the document ids on the host; for a DTensor of ids COLLECTIVE over
// its mesh. Error kShape: ids of another shape; ids with a cache; a document in two pieces; a cache under context
// parallelism.
AttentionPattern attention_pattern(const AttentionPatternOptions& pattern_options, const at::TensorOptions& options);

// How a score is computed from a query and a key, before the softmax.
struct AttentionScoreOptions {
  double scale = 0;  // factor of the product; 0: 1 / sqrt(head_dim)
  // Scores become softcap * tanh(score / softcap); 0: no cap. Fused attention kernels have no cap: the scores of 1024
  // queries are in memory at a time.
  double softcap = 0;
};

// Scaled dot product attention. Keys beyond the number of queries are cached ones and come first. The number of query
// heads may be a multiple of the number of key heads. Padding gives zeros where the pattern has pieces, except with a
// FixedDocumentSizes. Under context parallelism (by the pattern or a ContextParallelGuard) COLLECTIVE over the group.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                  const AttentionScoreOptions& scores = {});

}  // namespace tessera::nn
