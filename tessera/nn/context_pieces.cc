#include "tessera/nn/context_pieces.h"

#include <algorithm>
#include <limits>

namespace tessera::nn {
namespace {

// What queries [first, last) see of keys [from, to), all tokens of one document: trimmed so that each query sees a key
// and each key is seen.
struct SeenBlock {
  int64_t first, last, from, to;
  bool empty() const { return first >= last || from >= to; }
};

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
  const ContextChunk& queries;
  const ContextChunk& keys;

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

  // No window ends inside: keys before the queries, the square on the diagonal, queries behind the keys.
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

}  // namespace

// Shorter ones cost calls, longer ones scores outside the window.
int64_t masked_queries(int64_t sliding_window) { return std::clamp<int64_t>(sliding_window, 128, 1024); }

std::vector<ContextPiece> context_pieces(const std::vector<RowDocuments>& rows,
                                         const std::vector<ContextChunk>& queries,
                                         const std::vector<ContextChunk>& keys, const ContextPieceOptions& options) {
  std::vector<ContextPiece> pieces;
  for (const auto& row : rows) {
    for (const auto& query : queries) {
      for (const auto& key : keys) {
        PieceWriter writer{pieces, row, query, key};
        for (const auto& document : row.documents) {
          const auto block = seen_block(document, {query.begin, query.end()}, {key.begin, key.end()}, options);
          if (!block.empty()) writer.add_block(block, document, options);
        }
      }
    }
  }
  return pieces;
}

TokenRange tokens_seen(const std::vector<RowDocuments>& rows, const std::vector<ContextChunk>& queries,
                       const ContextChunk& keys, const ContextPieceOptions& options) {
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
