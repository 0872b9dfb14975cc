// Cross entropy of a linear head without its logits: the loss of cross_entropy(hidden weight^T, labels), summed.
//
//   at::Tensor loss = linear_cross_entropy(hidden, weight, labels);    // hidden [N, d], weight [V, d], labels int64 [N]
//   (loss / label_count).backward();
//
// Rows labelled kIgnoredLabel neither count nor cost anything. The other rows are taken in chunks whose fp32 logits fill
// at most chunk_bytes; the gradients of hidden and weight are computed with them in the forward pass, so the backward pass
// reads neither again and the weight may be freed in between. The result is an fp32 scalar. DTensors run as plain ops.
// Errors: kShape for sizes that do not fit or a label outside [0, V). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

constexpr int64_t kIgnoredLabel = -100;

struct LinearCrossEntropyOptions {
  int64_t chunk_bytes = int64_t{64} << 20;
};

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera
