#include "tessera/kernels/simd/gemv_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>

#define ROW_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))

namespace tessera::kernels {
namespace avx512_rows {
namespace {

constexpr int kLanes = 16, kTileRows = 6, kTileColumns = 4, kByteColumns = 4, kWideColumns = 8, kTallRows = 8,
              kFewRows = 0, kQ4Rows = 4, kQ4Columns = 4, kQ4Wide = 8;
using Lanes = __m512;
struct Halves {
  __m256 low, high;
};

ROW_TARGET inline Lanes zero() { return _mm512_setzero_ps(); }
ROW_TARGET inline Lanes fill(float value) { return _mm512_set1_ps(value); }
ROW_TARGET inline Lanes load(const float* from) { return _mm512_loadu_ps(from); }
ROW_TARGET inline Lanes load(const uint16_t* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
ROW_TARGET inline Lanes load(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
ROW_TARGET inline Lanes load(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
// The sixteen values that a block's codes select from: d * code + m.
using Q4Scale = __m512;
ROW_TARGET inline Q4Scale scale_of(const Q4Block& block) {
  const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_fmadd_ps(codes, _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(block.d))),
                         _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(block.m))));
}
ROW_TARGET inline Lanes values_of(const Q4Block& block, Q4Scale values, int part) {
  const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block.codes)));
  // _mm512_permutexvar_ps() uses only the lowest four bits of an index, so the other bits of `codes` need no mask.
  return _mm512_permutexvar_ps(part == 0 ? codes : _mm512_srli_epi32(codes, 4), values);
}
ROW_TARGET inline void store(float* to, Lanes lanes) { _mm512_storeu_ps(to, lanes); }
ROW_TARGET inline Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
ROW_TARGET inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
ROW_TARGET inline float sum(Lanes lanes) {
  // The lower and the upper eight numbers of `lanes` are extracted by std::bit_cast, because GCC 12 warns that the
  // results of its extract intrinsics are uninitialised.
  const auto halves = std::bit_cast<Halves>(lanes);
  const __m256 eight = _mm256_add_ps(halves.low, halves.high);
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

#include "tessera/kernels/simd/gemv_kernels_body.h"

}  // namespace
}  // namespace avx512_rows

const GemvKernels& avx512_gemv_kernels() {
  static constexpr GemvKernels kernels = avx512_rows::named("avx512");
  return kernels;
}

}  // namespace tessera::kernels

#undef ROW_TARGET
#else
namespace tessera::kernels {
const GemvKernels& avx512_gemv_kernels() { return plain_gemv_kernels(); }
}  // namespace tessera::kernels
#endif
