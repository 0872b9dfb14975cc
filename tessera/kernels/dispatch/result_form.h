// Dtypes and sizes of kernel results.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::kernels {

// Returns the compute dtype: fp64 for fp64, fp32 for all others.
inline at::ScalarType wide_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// Returns `sizes`, which has at least one dim, with `last` as the size of the last dim.
inline std::vector<int64_t> with_last(c10::IntArrayRef sizes, int64_t last) {
  auto changed = sizes.vec();
  changed.back() = last;
  return changed;
}

}  // namespace tessera::kernels
