#include "tessera/nn/attention/attention_mask.h"

#include <limits>
#include <unordered_set>

#include "tessera/base/error.h"

namespace tessera::nn {

at::Tensor visible_mask(const VisibleTokens& tokens, const at::TensorOptions& options) {
  const auto indices = at::TensorOptions().dtype(at::kLong).device(options.device());
  const auto query = at::arange(tokens.first_query, tokens.first_query + tokens.queries, indices).unsqueeze(1);
  const auto key = at::arange(tokens.keys, indices).unsqueeze(0);
  auto hidden = key.gt(query);
  if (tokens.window > 0) hidden.logical_or_(key.le(query - tokens.window));
  return at::zeros({tokens.queries, tokens.keys}, options)
      .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
}

std::vector<DocumentRun> document_runs(const int64_t* ids, int64_t tokens, int64_t row, std::string_view where) {
  std::vector<DocumentRun> runs;
  std::unordered_set<int64_t> seen;
  for (int64_t i = 0; i < tokens; ++i) {
    if (runs.empty() || runs.back().id != ids[i]) {
      TESSERA_CHECK(ids[i] < 0 || seen.insert(ids[i]).second, ErrorKind::kShape,
                    "[{}] row {}: document {} is in two pieces, wanted its tokens one after another", where, row,
                    ids[i]);
      runs.push_back({ids[i], 0});
    }
    ++runs.back().tokens;
  }
  return runs;
}

}  // namespace tessera::nn
