// Dtypes and sizes of results.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::kernels {

// fp32, or fp64 for fp64: what halves are computed in.
inline at::ScalarType wide_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// `sizes`, of one dim at least, with another size of the last one.
inline std::vector<int64_t> with_last(c10::IntArrayRef sizes, int64_t last) {
  auto changed = sizes.vec();
  changed.back() = last;
  return changed;
}

}  // namespace tessera::kernels
