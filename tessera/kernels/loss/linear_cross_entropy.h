// Cross entropy of a linear head without its logits: the loss of cross_entropy(hidden weight^T, labels), summed.
//
//   at::Tensor loss = linear_cross_entropy(hidden, weight, labels);    // hidden [N, d], weight [V, d], labels int64
//   [N] (loss / label_count).backward();
//
// Rows labelled kIgnoredLabel do not count, and cost nothing on a CPU. The rows are taken in chunks whose fp32 logits
// fill at most chunk_bytes; the gradients of hidden and weight are computed with them in the forward pass, so the
// backward pass reads neither again and the weight may be freed in between. The result is an fp32 scalar (fp64 of fp64
// operands) and has no second derivative.
//
// DTensors: rows or classes are computed on as they are sharded (tessera::linear_cross_entropy_with_gradients), so that
// no rank holds logits of more than a chunk of its rows by its classes; sharded classes take two small all-reduces a
// chunk and one of hidden's gradient. Plain labels beside DTensors are those of all rows, alike on all ranks.
// COLLECTIVE over their mesh.
//
// Errors: kShape for sizes that do not fit or a label outside [0, V), on all ranks alike. On an accelerator such a
// label makes the loss NaN instead: the host never waits. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/base/ignored_label.h"

namespace tessera::kernels {

struct LinearCrossEntropyOptions {
  int64_t chunk_bytes = int64_t{64} << 20;
  double softcap = 0;  // logits are softcap * tanh(logits / softcap), as in Gemma; 0: as they are
};

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::kernels
