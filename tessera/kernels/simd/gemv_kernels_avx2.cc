#include "tessera/kernels/simd/gemv_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#define ROW_TARGET __attribute__((target("avx2,fma,f16c")))

namespace tessera::kernels {
namespace avx2_rows {
namespace {

constexpr int kLanes = 8, kTileRows = 4, kTileColumns = 3, kByteColumns = 2, kWideColumns = 8, kTallRows = 0,
              kFewRows = 16, kQ4Rows = 8, kQ4Columns = 1, kQ4Wide = 4;
using Lanes = __m256;

ROW_TARGET inline Lanes zero() { return _mm256_setzero_ps(); }
ROW_TARGET inline Lanes fill(float value) { return _mm256_set1_ps(value); }
ROW_TARGET inline Lanes load(const float* from) { return _mm256_loadu_ps(from); }
ROW_TARGET inline Lanes load(const uint16_t* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
ROW_TARGET inline Lanes load(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
ROW_TARGET inline Lanes load(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
struct Q4Scale {
  __m256 d, m;
};
ROW_TARGET inline Q4Scale scale_of(const Q4Block& block) {
  return {_mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(block.d))),
          _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(block.m)))};
}
// Decodes eight of a block's 32 elements. Parts 0 and 1 are the lower four bits of codes 0-7 and 8-15, parts 2 and 3
// the upper four bits of the same codes.
ROW_TARGET inline Lanes values_of(const Q4Block& block, Q4Scale scale, int part) {
  const __m256i codes =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block.codes + part % 2 * 8)));
  const __m256i own = _mm256_and_si256(part < 2 ? codes : _mm256_srli_epi32(codes, 4), _mm256_set1_epi32(15));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(own), scale.d, scale.m);
}
ROW_TARGET inline void store(float* to, Lanes lanes) { _mm256_storeu_ps(to, lanes); }
ROW_TARGET inline Lanes times(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
ROW_TARGET inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
ROW_TARGET inline float sum(Lanes lanes) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

#include "tessera/kernels/simd/gemv_kernels_body.h"

}  // namespace
}  // namespace avx2_rows

const GemvKernels& avx2_gemv_kernels() {
  static constexpr GemvKernels kernels = avx2_rows::named("avx2");
  return kernels;
}

}  // namespace tessera::kernels

#undef ROW_TARGET
#else
namespace tessera::kernels {
const GemvKernels& avx2_gemv_kernels() { return plain_gemv_kernels(); }
}  // namespace tessera::kernels
#endif
