// How a copy lies in memory that a view gathers, because what it is taken of is cut where it may not be.
#pragma once

#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

// Of a tensor of these sizes and strides: dense, its dims in the same order, so that what can be viewed of it can be of
// the copy; contiguous where elements share memory.
inline Sizes strides_of_gathered(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] == 0) return dense_strides(sizes);
  }
  return strides_in_order(sizes, strides);
}

}  // namespace tessera
