#include "tessera/data/rows/batch.h"

#include <ATen/ops/ge.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sum.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"

namespace tessera::data {

Batch make_batch(at::Tensor tokens, at::Tensor labels, at::Tensor positions, at::Tensor document_ids) {
  for (const auto* tensor : {&tokens, &labels, &positions, &document_ids}) {
    TESSERA_CHECK(
        tensor->dim() == 2 && tensor->sizes() == tokens.sizes() && tensor->scalar_type() == at::kLong,
        ErrorKind::kShape,
        "[data.batch] found {} [{}], wanted int64 [{}] of two dimensions for tokens, labels, positions and documents.",
        at::toString(tensor->scalar_type()), fmt::join(tensor->sizes(), ", "), fmt::join(tokens.sizes(), ", "));
  }
  Batch batch;
  batch.label_tokens = labels.ne(kIgnoredLabel).sum().item<int64_t>();
  batch.tokens_used = document_ids.ge(0).sum().item<int64_t>();
  batch.tokens = std::move(tokens);
  batch.labels = std::move(labels);
  batch.positions = std::move(positions);
  batch.document_ids = std::move(document_ids);
  return batch;
}

}  // namespace tessera::data
