#include "tessera/nn/attention/context_pieces.h"

#include <algorithm>
#include <limits>

namespace tessera::nn {
namespace {

// Queries [first, last) and keys [from, to) of one document, trimmed so that each query sees a key and each key is seen
// by a query.
struct SeenBlock {
  int64_t first, last, from, to;
  bool empty() const { return first >= last || from >= to; }
};

// Returns the parts of the ranges `queries` and `keys` that are inside `document`. With options.causal the function
// then removes from them, in this order: keys after the last query; keys before the first query's window, if there is a
// sliding window; queries before the first key; queries whose window begins after the last key. After a step, the
// conditions of the earlier steps still hold.
SeenBlock seen_block(const TokenRange& document, const TokenRange& queries, const TokenRange& keys,
                     const ContextPieceOptions& options) {
  SeenBlock block{std::max(queries.begin, document.begin), std::min(queries.end, document.end),
                  std::max(keys.begin, document.begin), std::min(keys.end, document.end)};
  if (!options.causal || block.empty()) return block;
  const int64_t window = options.sliding_window;
  block.to = std::min(block.to, block.last);
  if (window > 0) block.from = std::max(block.from, block.first - window + 1);
  block.first = std::max(block.first, block.from);
  if (window > 0) block.last = std::min(block.last, block.to - 1 + window);
  return block;
}

struct PieceWriter {
  std::vector<ContextPiece>& pieces;
  const RowDocuments& row;
  const kernels::ContextChunk& queries;
  const kernels::ContextChunk& keys;

  void add(ContextPiece::Kind kind, const SeenBlock& block) {
    if (block.empty()) return;
    pieces.push_back({.kind = kind,
                      .row = row.row,
                      .rows = row.rows,
                      .query = block.first - queries.begin + queries.local,
                      .queries = block.last - block.first,
                      .key = block.from - keys.begin + keys.local,
                      .keys = block.to - block.from,
                      .distance = kind == ContextPiece::Kind::kMasked ? block.first - block.from : 0});
  }

  // Adds the pieces of a block in which no query's window excludes a key. There are up to three: all queries with the
  // keys before the first query (full); the queries and keys at the same positions (causal); and the queries after the
  // last key with the keys of the causal piece (full).
  void add_causal(const SeenBlock& block) {
    add(ContextPiece::Kind::kFull, {block.first, block.last, block.from, std::min(block.first, block.to)});
    if (block.to <= block.first) return;
    add(ContextPiece::Kind::kCausal, {block.first, block.to, block.first, block.to});
    add(ContextPiece::Kind::kFull, {block.to, block.last, block.first, block.to});
  }

  void add_block(const SeenBlock& block, const TokenRange& document, const ContextPieceOptions& options) {
    const auto no_window_ends = [&](const SeenBlock& each) {
      return options.sliding_window == 0 || each.last - each.from <= options.sliding_window;
    };
    if (!options.causal) return add(ContextPiece::Kind::kFull, block);
    if (no_window_ends(block)) return add_causal(block);
    // Some query's window begins inside the block. Split the block into blocks of `step` queries and trim each to the
    // keys that its queries see.
    const int64_t step = masked_queries(options.sliding_window);
    for (int64_t begin = block.first; begin < block.last; begin += step) {
      const auto part =
          seen_block(document, {begin, std::min(begin + step, block.last)}, {block.from, block.to}, options);
      if (part.empty()) continue;
      if (no_window_ends(part)) {
        add_causal(part);
      } else {
        add(ContextPiece::Kind::kMasked, part);
      }
    }
  }
};

// ---- merging pieces ----

using Pieces = std::vector<ContextPiece>;

// If the two ranges are adjacent, extends [begin, begin + count) by [other, other + others); else returns false.
bool extend(int64_t& begin, int64_t& count, int64_t other, int64_t others) {
  if (begin + count != other && other + others != begin) return false;
  begin = std::min(begin, other);
  count += others;
  return true;
}

// Merges `other` into `piece` if both are kFull pieces (every query sees every key), have the same queries or the same
// keys, and their union is one kFull piece. Returns whether the pieces were merged.
bool join(ContextPiece& piece, const ContextPiece& other) {
  if (piece.kind != ContextPiece::Kind::kFull || other.kind != ContextPiece::Kind::kFull) return false;
  const bool same_queries = piece.query == other.query && piece.queries == other.queries;
  const bool same_keys = piece.key == other.key && piece.keys == other.keys;
  return (same_queries && extend(piece.key, piece.keys, other.key, other.keys)) ||
         (same_keys && extend(piece.query, piece.queries, other.query, other.queries));
}

// Merges pieces of one document in one row until none can be merged.
void join_neighbours(Pieces& pieces) {
  for (bool joined = true; joined;) {
    joined = false;
    for (size_t i = 0; i < pieces.size(); ++i) {
      for (size_t j = pieces.size(); j-- > i + 1;) {
        if (!join(pieces[i], pieces[j])) continue;
        pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(j));
        joined = true;
      }
    }
  }
}

// Merges three pieces into the causal piece of the tokens [0, m): the causal pieces of [0, n) and of [n, m), and the
// full piece with the queries [n, m) and the keys [0, n).
void join_triangles(Pieces& pieces) {
  const auto causal_piece = [&](auto&& fits) {
    return std::ranges::find_if(
        pieces, [&](const ContextPiece& each) { return each.kind == ContextPiece::Kind::kCausal && fits(each); });
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto between = pieces[i];
    if (between.kind != ContextPiece::Kind::kFull) continue;
    const int64_t query = between.query, key = between.key + between.keys;  // where [0, n) ends and [n, m) begins
    const auto upper = causal_piece(
        [&](const ContextPiece& each) { return each.query + each.queries == query && each.key + each.keys == key; });
    const auto lower = causal_piece([&](const ContextPiece& each) { return each.query == query && each.key == key; });
    if (upper == pieces.end() || lower == pieces.end()) continue;
    if (upper->keys != between.keys || lower->queries != between.queries) continue;
    upper->queries += lower->queries;
    upper->keys += lower->keys;
    const auto later = std::max(lower - pieces.begin(), static_cast<std::ptrdiff_t>(i)),
               earlier = std::min(lower - pieces.begin(), static_cast<std::ptrdiff_t>(i));
    pieces.erase(pieces.begin() + later);
    pieces.erase(pieces.begin() + earlier);
    i = static_cast<size_t>(-1);  // start again: the indices have changed
  }
}

}  // namespace

// With fewer queries per piece there are more kernel calls; with more queries, more scores outside the window are
// computed.
int64_t masked_queries(int64_t sliding_window) { return std::clamp<int64_t>(sliding_window, 128, 1024); }

std::vector<ContextPiece> context_pieces(const std::vector<RowDocuments>& rows,
                                         const std::vector<kernels::ContextChunk>& queries,
                                         const std::vector<kernels::ContextChunk>& keys,
                                         const ContextPieceOptions& options) {
  Pieces pieces;
  for (const auto& row : rows) {
    for (const auto& document : row.documents) {
      Pieces of_document;
      for (const auto& query : queries) {
        for (const auto& key : keys) {
          PieceWriter writer{of_document, row, query, key};
          const auto block = seen_block(document, {query.begin, query.end()}, {key.begin, key.end()}, options);
          if (!block.empty()) writer.add_block(block, document, options);
        }
      }
      join_neighbours(of_document);
      join_triangles(of_document);
      pieces.insert(pieces.end(), of_document.begin(), of_document.end());
    }
  }
  return pieces;
}

TokenRange tokens_seen(const std::vector<RowDocuments>& rows, const std::vector<kernels::ContextChunk>& queries,
                       const kernels::ContextChunk& keys, const ContextPieceOptions& options) {
  TokenRange seen{std::numeric_limits<int64_t>::max(), 0};
  for (const auto& row : rows) {
    for (const auto& query : queries) {
      for (const auto& document : row.documents) {
        const auto block = seen_block(document, {query.begin, query.end()}, {keys.begin, keys.end()}, options);
        if (block.empty()) continue;
        seen.begin = std::min(seen.begin, block.from);
        seen.end = std::max(seen.end, block.to);
      }
    }
  }
  return seen.empty() ? TokenRange{} : seen;
}

}  // namespace tessera::nn
