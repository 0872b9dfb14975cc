// Vectors of eight fp32 numbers: the AVX2 half of lanes.h, which documents the functions.
#pragma once

#include "tessera/kernels/simd/lanes.h"

#ifdef TESSERA_HAS_LANES
#include <immintrin.h>

namespace tessera::kernels::lanes_avx2 {

#pragma GCC push_options
#pragma GCC target("avx2,fma")

constexpr int64_t kLanes = 8;
constexpr int kTileRows = 6, kTileColumns = 2;  // registers of a product tile; columns in vectors
using Lanes = __m256;
using Mask = __m256i;  // per lane all bits set or none

inline Lanes fill(float value) { return _mm256_set1_ps(value); }
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes fms(Lanes a, Lanes b, Lanes c) { return _mm256_fmsub_ps(a, b, c); }
inline Lanes fnma(Lanes a, Lanes b, Lanes c) { return _mm256_fnmadd_ps(a, b, c); }
inline Lanes max(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }

inline Mask not_numbers(Lanes values) { return _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)); }
inline bool any(const Mask& mask) { return _mm256_testz_si256(mask, mask) == 0; }
// Returns a mask in which the first `count` lanes are set. The function loads eight lanes of `kBits`, which has eight
// set lanes and then eight cleared lanes.
inline Mask first_lanes(int64_t count) {
  alignas(64) static constexpr int32_t kBits[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  const int64_t bounded = count < 0 ? 0 : count > kLanes ? kLanes : count;
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kBits + kLanes - bounded));
}
inline Mask lanes_between(int64_t low, int64_t high) {
  return _mm256_andnot_si256(first_lanes(low), first_lanes(high));
}
inline Lanes select(const Mask& mask, Lanes yes, Lanes no) {
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(mask));
}

inline Lanes load_lanes(const float* from) { return _mm256_loadu_ps(from); }
inline Lanes load_lanes(const c10::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Lanes load_lanes(const Mask& mask, const float* from, Lanes others) {
  return select(mask, _mm256_maskload_ps(from, mask), others);
}

inline __m256i bf16_bits(Lanes values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff))), 16);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), not_numbers(values));
}
template <class T>
Lanes rounded_to(Lanes values) {
  if constexpr (std::is_same_v<T, float>) return values;
  return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(values), 16));
}

inline void store_lanes(float* to, Lanes values) { _mm256_storeu_ps(to, values); }
inline void store_lanes(c10::BFloat16* to, Lanes values) {
  const __m256i bits = bf16_bits(values);
  // _mm256_packus_epi32 packs each 128-bit half separately, so the eight results are in the 64-bit parts 0 and 2. The
  // permutation puts these next to each other.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
inline void store_lanes(const Mask& mask, float* to, Lanes values) { _mm256_maskstore_ps(to, mask, values); }

// rounded() returns the nearest integer. times_power_of_two() returns x * 2^power, where power is an integer in [-151,
// 129].
inline Lanes rounded(Lanes x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes power_of_two(__m256i exponent) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}
// times_power_of_two() multiplies x by two powers of two, one after the other. The first product is exact, so a result
// below the smallest normal number is rounded only once.
inline Lanes times_power_of_two(Lanes x, Lanes power) {
  const __m256i whole = _mm256_cvtps_epi32(power), half = _mm256_srai_epi32(whole, 1);
  return mul(mul(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}
inline Lanes between(Lanes x, float low, float high) {
  return _mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), x));
}

inline float sum_of(Lanes values) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_of(Lanes values) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Transposes a square of kLanes by kLanes numbers: rows[i] becomes column i.
inline void transpose(Lanes (&rows)[kLanes]) {
  Lanes other[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    other[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    other[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m256d a = _mm256_castps_pd(other[4 * i + j]), b = _mm256_castps_pd(other[4 * i + 2 + j]);
      rows[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      rows[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    other[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
    other[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) rows[i] = other[i];
}

#include "tessera/kernels/simd/lanes_body.h"

#pragma GCC pop_options

}  // namespace tessera::kernels::lanes_avx2
#endif
