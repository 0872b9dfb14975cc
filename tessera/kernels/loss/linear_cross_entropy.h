// Cross entropy of a linear head without the full logits: cross_entropy(hidden weight^T, labels), summed over rows.
//
//   // hidden [N, d], weight [V, d], labels int64 [N]
//   at::Tensor loss = linear_cross_entropy(hidden, weight, labels);
//   (loss / label_count).backward();
//
// Rows with the label kIgnoredLabel add nothing to the loss, and cost no computation on a CPU. The rows are processed
// in chunks whose fp32 logits fill at most chunk_bytes. The forward pass computes the gradients of hidden and weight in
// the same chunks, so the backward pass reads neither again and the weight may be freed in between. The result is an
// fp32 scalar (fp64 for fp64 inputs) without a second derivative.
//
// DTensors: rows or classes may be sharded (operation tessera::linear_cross_entropy_with_gradients). A rank holds the
// logits of at most one chunk of its rows by its classes. Sharded classes cost two small all-reduces per chunk and one
// all-reduce of hidden's gradient. Plain labels with DTensor operands are the labels of all rows, the same on all
// ranks. COLLECTIVE over their mesh.
//
// Errors: kShape for sizes that do not fit or a label outside [0, V), the same on all ranks. On an accelerator such a
// label makes the loss NaN instead, because the host never waits for the device. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/base/ignored_label.h"

namespace tessera::kernels {

struct LinearCrossEntropyOptions {
  int64_t chunk_bytes = int64_t{64} << 20;
  double softcap = 0;  // logits become softcap * tanh(logits / softcap), as in Gemma; 0: unchanged
};

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::kernels
