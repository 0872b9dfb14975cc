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
  const auto level = vector_level();
  if (level == VectorLevel::kAvx512) return avx512_row_kernels();
  return level == VectorLevel::kAvx2 ? avx2_row_kernels() : plain_row_kernels();
}

}  // namespace tessera::kernels
