// What attention makes of a row before it computes: masks of who sees whom, and the documents that lie in it.
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
  int64_t first_query = 0;  // counted from the first key
  int64_t queries = 0, keys = 0;
  int64_t window = 0;  // a query sees the key at its own place and window - 1 before it; 0: all before it
};
// [queries, keys]: 0 where a query sees a key, else minus infinity. To be added to scores.
at::Tensor visible_mask(const VisibleTokens& tokens, const at::TensorOptions& options);

// Equal ids in a row; a negative one is padding.
struct DocumentRun {
  int64_t id = 0, tokens = 0;
};
// Of a row of ids. Error kShape, named [where]: a document in two pieces.
std::vector<DocumentRun> document_runs(const int64_t* ids, int64_t tokens, int64_t row, std::string_view where);

}  // namespace tessera::nn
