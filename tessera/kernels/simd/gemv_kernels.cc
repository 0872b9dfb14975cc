#include "tessera/kernels/simd/gemv_kernels.h"

#include <algorithm>
#include <vector>

#include "tessera/kernels/simd/vector_level.h"

namespace tessera::kernels {

float* thread_buffer(int64_t floats) {
  static thread_local std::vector<float> buffer;
  buffer.resize(std::max(buffer.size(), static_cast<size_t>(floats)));
  return buffer.data();
}

const GemvKernels& gemv_kernels() {
  const auto level = vector_level();
  if (level == VectorLevel::kAvx512) return avx512_gemv_kernels();
  return level == VectorLevel::kAvx2 ? avx2_gemv_kernels() : plain_gemv_kernels();
}

}  // namespace tessera::kernels
