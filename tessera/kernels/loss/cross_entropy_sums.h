// The loss of a linear head and its gradients, chunk by chunk, of all classes or of a part of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/collectives/collectives.h"

namespace tessera::kernels {

// Which classes the weight's rows are, and who has the others.
struct ClassPart {
  int64_t first = 0;
  int64_t most = 0;                    // classes of the largest part: all parts take chunks of equal size
  std::vector<comm::Group*> others{};  // over which sums and maxima are brought together, one after another
};

struct CrossEntropyWanted {
  bool hidden_gradient = false;
  bool weight_gradient = false;
  int64_t chunk_bytes = 0;
  double softcap = 0;  // 0: none
};

struct CrossEntropySums {
  at::Tensor loss;         // scalar
  at::Tensor grad_hidden;  // summed over the parts; undefined where not wanted
  at::Tensor grad_weight;  // of the part's classes
};

// hidden [N, d], weight [classes of the part, d], labels int64 [N]: kIgnoredLabel, or a class of any part; another one
// is not found on a CPU and makes the loss NaN elsewhere, where the host waits for nothing and ignored rows cost what
// others do. COLLECTIVE over part.others, whose ranks must have the same labels.
CrossEntropySums cross_entropy_sums(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                    const ClassPart& part, const CrossEntropyWanted& wanted);

}  // namespace tessera::kernels
