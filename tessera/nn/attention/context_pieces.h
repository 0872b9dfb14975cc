// Which products of attention there are between some of a sequence's queries and some of its keys: what is not in a
// piece is not computed.
//
//   const auto pieces = context_pieces({{.documents = {{0, 6}, {6, 10}}}}, queries, keys, {.sliding_window = 4});
//
// Chunks say which tokens of the sequence queries and keys are and where they stand in their tensors. Without a window
// every piece is a product of all with all or a causal one of equally many; where a window begins inside, a piece has a
// part of a mask whose entries depend on the distance of query and key alone. In every piece each query sees a key.
// Pieces of neighbouring chunks are one where that is a product of all with all or a causal one.
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

// Documents of `rows` rows that are alike, ascending; what lies in none is padding, which sees nothing.
struct RowDocuments {
  int64_t row = 0, rows = 1;
  std::vector<TokenRange> documents{};
};

struct ContextPiece {
  enum class Kind : uint8_t { kFull, kCausal, kMasked };
  Kind kind = Kind::kFull;
  int64_t row = 0, rows = 1;
  int64_t query = 0, queries = 0;  // in their tensor
  int64_t key = 0, keys = 0;
  int64_t distance = 0;  // kMasked: from the first query's token back to the first key's
};

struct ContextPieceOptions {
  int64_t sliding_window = 0;  // a token sees itself and window - 1 before it; 0: all before it
  bool causal = true;          // false: all tokens of a document see one another; without a window
};

std::vector<ContextPiece> context_pieces(const std::vector<RowDocuments>& rows,
                                         const std::vector<kernels::ContextChunk>& queries,
                                         const std::vector<kernels::ContextChunk>& keys,
                                         const ContextPieceOptions& options);

// The part of a chunk that keys must come from: from the first token that any of the queries sees to the last one.
TokenRange tokens_seen(const std::vector<RowDocuments>& rows, const std::vector<kernels::ContextChunk>& queries,
                       const kernels::ContextChunk& keys, const ContextPieceOptions& options);

// Queries of a masked piece at most.
int64_t masked_queries(int64_t sliding_window);

}  // namespace tessera::nn
