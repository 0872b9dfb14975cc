// The loss of a linear head and its gradients, computed in chunks of rows, for all classes or this rank's part of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/collectives/collectives.h"

namespace tessera::kernels {

// The classes whose rows of the head's weight this rank has, and the groups whose ranks hold the other classes.
struct ClassShard {
  int64_t first = 0;                         // the first class of the weight's rows
  int64_t max_classes = 0;                   // number of classes of the largest part; all ranks use it for equal chunks
  std::vector<comm::Group*> shard_groups{};  // maxima and sums are all-reduced over these groups, one after another
};

struct CrossEntropyRequest {
  bool hidden_gradient = false;
  bool weight_gradient = false;
  int64_t chunk_bytes = 0;
  double softcap = 0;  // logits become softcap * tanh(logits / softcap); 0: unchanged
};

struct CrossEntropySums {
  at::Tensor loss;         // scalar
  at::Tensor grad_hidden;  // [N, d], summed over the parts; undefined where not requested
  at::Tensor grad_weight;  // of the part's classes; undefined where not requested
};

// Returns the loss, summed over all rows, and the gradients that `request` asks for. Shapes: hidden [N, d]; weight
// [number of this rank's classes, d]; labels int64 [N]. A label is kIgnoredLabel or a class of any rank. The caller
// must have checked labels that are on a CPU. On an accelerator a wrong label makes the loss NaN, because the host does
// not wait for the labels, and ignored rows cost as much as others. COLLECTIVE over part.shard_groups, whose ranks must
// have the same labels.
CrossEntropySums cross_entropy_sums(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                    const ClassShard& part, const CrossEntropyRequest& request);

}  // namespace tessera::kernels
