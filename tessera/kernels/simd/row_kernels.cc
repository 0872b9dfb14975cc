#include "tessera/kernels/simd/row_kernels.h"

#include <algorithm>
#include <vector>

#include "tessera/kernels/simd/vector_level.h"

namespace tessera::kernels {

float* widening_room(int64_t floats) {
  static thread_local std::vector<float> room;
  room.resize(std::max(room.size(), static_cast<size_t>(floats)));
  return room.data();
}

const RowKernels& row_kernels() {
  switch (vector_level()) {
    case VectorLevel::kAvx512:
      return avx512_row_kernels();
    case VectorLevel::kAvx2:
      return avx2_row_kernels();
    case VectorLevel::kPlain:
      break;
  }
  return plain_row_kernels();
}

}  // namespace tessera::kernels
