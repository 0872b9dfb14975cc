// Which tokens see which in self-attention, said and computed in memory linear in the number of tokens.
//
//   const AttentionPattern pattern = attention_pattern({.rows = B, .tokens = T, .document_ids = ids}, x.options());
//   at::Tensor y = attend(q, k, v, pattern);     // q [B, H, T, d], k and v [B, G, cached + T, d]: [B, H, T, d]
//
// A token sees itself and what precedes it in its document, of that at most sliding_window - 1 tokens. One document a
// row, with or without padding behind it, is plain causal attention. Otherwise the rows are laid end to end and cut
// into pieces: a document, or where it is longer than the window a part of one with as many parts before it as the
// window reaches. A value type, made once a forward and shared by all layers; thread-safe.
// Where there are kernels for whole documents the pieces are not taken apart: on a CPU
// kernels/attention/causal_attention.h, on an accelerator in 16 bits kernels/attention/flash_attention.h.
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
    int64_t earlier = 0;  // pieces before it whose keys it sees too
  };
  std::vector<Piece> pieces{};  // of all rows end to end; empty: plain causal
  int64_t sliding_window = 0;
  int64_t window_piece = 0;  // tokens of a full piece of kind kWindow
  at::Tensor window_mask{};  // added to the scores of such a piece, its last window_piece columns are its own keys
  // Of the same rows, on the CPU, where there are pieces: the first key that each token sees, int64 [rows, tokens].
  at::Tensor first_key{};
  // Of the same rows, where the device has kernels that read lengths: `begins` of the documents among the tokens that
  // are no padding (kernels/attention/flash_attention.h), and the tokens of documents and of padding in turn.
  struct Documents {
    at::Tensor begins{};
    int64_t longest = 0;
    std::vector<int64_t> runs{};
    bool have_room = false;  // laid out by a DocumentRoom: `begins` and `longest` are all there is to know of them
  };
  Documents documents{};
  // Where the tokens lie over ranks: in place of all above.
  std::shared_ptr<const ContextPattern> context{};
};

// Where lengths of documents are read by kernels alone: as many places for documents, and as long a longest one, in
// each batch. Both are powers of two, and grow with what comes; padding counts as a document.
struct DocumentRoom {
  int64_t documents = 16;
  int64_t longest = 128;
};

struct AttentionPatternOptions {
  int64_t rows = 1;
  int64_t tokens = 0;  // of each row in this call
  int64_t cached = 0;  // tokens before them in the cache
  // int64 [rows, tokens]: a run of equal numbers is a document, negative ones are padding, whose results nobody reads;
  // undefined: one document a row.
  at::Tensor document_ids{};
  int64_t sliding_window = 0;  // a token sees itself and window - 1 before it; 0: all before it
  // Where a row's tokens lie over ranks: of those, this rank's are `tokens`, and the document ids are here already
  // (context_attention.h).
  std::shared_ptr<const ContextSequence> context{};
  // Null: documents are laid out as they are. Else the heads must be such as the device's kernels by lengths take, with
  // no softcap. Not owned, and not used in float32.
  DocumentRoom* room = nullptr;
};

// `options` tells dtype and device of the queries. Reads the document ids on the host; where they are a DTensor it is
// COLLECTIVE over its mesh. Error kShape: ids of another shape, ids beside a cache, a document in two pieces, a
// cache beside a sequence over ranks.
AttentionPattern attention_pattern(const AttentionPatternOptions& wanted, const at::TensorOptions& options);

// How a query scores a key, before the softmax.
struct AttentionScores {
  double scale = 0;    // of their product; 0: one over the square root of the head's size
  double softcap = 0;  // scores are softcap * tanh(score / softcap); 0: as they are. Fused attention cannot do that:
                       // scores of 1024 queries at a time are in memory
};

// Scaled dot product attention. Keys beyond the number of queries are cached ones, before all pieces. Query heads may
// be a multiple of the key heads. Padding gives zeros where the pattern has pieces, but in a DocumentRoom. COLLECTIVE
// where tokens lie over ranks, by the pattern or a ContextScope: over their group.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                  const AttentionScores& scores = {});

}  // namespace tessera::nn
