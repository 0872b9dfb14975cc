#include "tessera/train/run/run_rows.h"

#include <algorithm>

#include "tessera/base/ignored_label.h"

namespace tessera::train {
namespace {

// Rows [first, first + count) of a batch.
data::Batch slice_rows(const data::Batch& batch, int64_t first, int64_t count) {
  auto rows = [&](const at::Tensor& tensor) { return tensor.narrow(0, first, count); };
  return data::make_batch(rows(batch.tokens), rows(batch.labels), rows(batch.positions), rows(batch.document_ids));
}

}  // namespace

std::vector<data::Batch> micro_batches(const data::Batch& batch, int64_t rows) {
  std::vector<data::Batch> parts;
  for (int64_t first = 0; first < batch.tokens.size(0); first += rows) {
    parts.push_back(slice_rows(batch, first, std::min(rows, batch.tokens.size(0) - first)));
  }
  return parts;
}

std::vector<data::Batch> batches_of_rank(const data::Dataset& dataset, int64_t rows, const RunMesh& run_mesh) {
  // Row r belongs to rank r % data_size. Every rank has `each` rows; the last ones of some ranks are padding, whose
  // labels are ignored.
  const int64_t each = (dataset.rows() + run_mesh.data_size() - 1) / run_mesh.data_size();
  std::vector<data::Batch> batches;
  for (int64_t first = 0; first < each; first += rows) {
    std::vector<int64_t> indices;
    for (int64_t i = first; i < std::min(first + rows, each); ++i) {
      const int64_t row = i * run_mesh.data_size() + run_mesh.data_rank();
      indices.push_back(row < dataset.rows() ? row : data::kPaddingRow);
    }
    batches.push_back(run_mesh.local_tokens(dataset.rows(indices)));
  }
  return batches;
}

// labels[i] is the token at position i + 1. So the prompt ends with the first position whose label is not ignored: the
// next token is the first one that is trained on. Only the first document is used; a packed row holds several.
std::vector<int64_t> sample_prompt(const data::Batch& row) {
  constexpr int64_t kMostOfText = 16;
  const auto* tokens = row.tokens.const_data_ptr<int64_t>();
  const auto* labels = row.labels.const_data_ptr<int64_t>();
  const auto* documents = row.document_ids.const_data_ptr<int64_t>();
  int64_t length = 1, document = 1;
  while (document < row.tokens.size(1) && documents[document] == documents[0]) ++document;
  while (length < document && labels[length - 1] == kIgnoredLabel) ++length;
  if (length == 1) length = std::max<int64_t>(1, std::min(kMostOfText, document / 2));
  return {tokens, tokens + length};
}

}  // namespace tessera::train
