// Splits the attention between some queries and some keys of a sequence into pieces. Scores of a query and a key that
// are in no common piece are not computed.
//
//   const auto pieces = context_pieces({{.documents = {{0, 6}, {6, 10}}}}, queries, keys, {.sliding_window = 4});
//
// A kernels::ContextChunk gives the positions of consecutive tokens in the sequence and in the local tensor. Without a
// sliding window every piece is either full (all queries see all keys) or causal (as many keys as queries). A piece in
// which the window excludes some keys is masked; its mask entries depend only on the distance between query and key. In
// every piece each query sees at least one key. Pieces of neighbouring chunks are merged if the result is again full or
// causal.
//
// Pure functions of values; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/kernels/attention/context_layout.h"

namespace tessera::nn {

struct TokenRange {
  int64_t begin = 0, end = 0;
  bool empty() const { return begin >= end; }
  bool operator==(const TokenRange&) const = default;
};

// The documents of `rows` consecutive rows that have the same documents, in ascending order. Tokens outside of all
// documents are padding, which sees nothing.
struct RowDocuments {
  int64_t row = 0, rows = 1;
  std::vector<TokenRange> documents{};
};

struct ContextPiece {
  enum class Kind : uint8_t { kFull, kCausal, kMasked };
  Kind kind = Kind::kFull;
  int64_t row = 0, rows = 1;
  int64_t query = 0, queries = 0;  // position in the query tensor
  int64_t key = 0, keys = 0;       // position in the key tensor
  int64_t distance = 0;            // kMasked: position of the first query minus position of the first key
};

struct ContextPieceOptions {
  int64_t sliding_window = 0;  // a token sees itself and window - 1 earlier tokens; 0: all earlier ones
  bool causal = true;          // false: all tokens of a document see each other; without a window
};

std::vector<ContextPiece> context_pieces(const std::vector<RowDocuments>& rows,
                                         const std::vector<kernels::ContextChunk>& queries,
                                         const std::vector<kernels::ContextChunk>& keys,
                                         const ContextPieceOptions& options);

// Returns the range of tokens of the chunk `keys` from the first to the last token that any of the queries sees.
TokenRange tokens_seen(const std::vector<RowDocuments>& rows, const std::vector<kernels::ContextChunk>& queries,
                       const kernels::ContextChunk& keys, const ContextPieceOptions& options);

// The largest number of queries of a masked piece.
int64_t masked_queries(int64_t sliding_window);

}  // namespace tessera::nn
