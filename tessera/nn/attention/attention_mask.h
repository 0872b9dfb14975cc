// Causal and sliding-window attention masks, and the documents in a row of document ids.
//
//   at::Tensor mask = visible_mask({.first_query = 4, .queries = 2, .keys = 6, .window = 3}, options);   // [2, 6]
//   for (const auto& run : document_runs(ids, tokens, row, "nn.attention")) ...
//
// Thread-safe. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera::nn {

struct VisibleTokens {
  int64_t first_query = 0;  // position of the first query, counted from the first key
  int64_t queries = 0, keys = 0;
  int64_t window = 0;  // a query sees the key at its own position and window - 1 earlier ones; 0: all earlier ones
};
// Returns a mask [queries, keys] that is added to attention scores: 0 where a query sees a key, else minus infinity.
at::Tensor visible_mask(const VisibleTokens& tokens, const at::TensorOptions& options);

// A run of consecutive tokens of a row with the same document id. A negative id is padding.
struct DocumentRun {
  int64_t id = 0, tokens = 0;
};
// Returns the runs of a row of document ids. Error kShape, with the prefix [where], if an id occurs in two separate
// runs.
std::vector<DocumentRun> document_runs(const int64_t* ids, int64_t tokens, int64_t row, std::string_view where);

}  // namespace tessera::nn
