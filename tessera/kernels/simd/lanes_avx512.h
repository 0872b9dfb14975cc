// Vectors of sixteen fp32 numbers: the AVX-512 half of lanes.h, which documents the functions.
#pragma once

#include "tessera/kernels/simd/lanes.h"
#include "tessera/kernels/simd/lanes_avx2.h"

#ifdef TESSERA_HAS_LANES
#include <immintrin.h>

namespace tessera::kernels::lanes_avx512 {

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false positives in GCC 12's own intrinsics headers
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

constexpr int64_t kLanes = 16;
constexpr int kTileRows = 4, kTileColumns = 4;  // registers of a product tile; columns in vectors
using Lanes = __m512;
using Mask = __mmask16;

inline Lanes fill(float value) { return _mm512_set1_ps(value); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes fms(Lanes a, Lanes b, Lanes c) { return _mm512_fmsub_ps(a, b, c); }
inline Lanes fnma(Lanes a, Lanes b, Lanes c) { return _mm512_fnmadd_ps(a, b, c); }
inline Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }

inline Mask not_numbers(Lanes values) { return _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q); }
inline bool any(Mask mask) { return mask != 0; }
inline Mask first_lanes(int64_t count) {
  return static_cast<Mask>(count >= kLanes ? 0xffff : (1U << (count < 0 ? 0 : count)) - 1U);
}
inline Mask lanes_between(int64_t low, int64_t high) {
  return static_cast<Mask>(first_lanes(high) & ~first_lanes(low));
}
inline Lanes select(Mask mask, Lanes yes, Lanes no) { return _mm512_mask_mov_ps(no, mask, yes); }

inline Lanes load_lanes(const float* from) { return _mm512_loadu_ps(from); }
inline Lanes load_lanes(const c10::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Lanes load_lanes(Mask mask, const float* from, Lanes others) { return _mm512_mask_loadu_ps(others, mask, from); }

inline __m512i bf16_bits(Lanes values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_mask_mov_epi32(rounded, not_numbers(values), _mm512_set1_epi32(0x7fc0));
}
template <class T>
Lanes rounded_to(Lanes values) {
  if constexpr (std::is_same_v<T, float>) return values;
  return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(values), 16));
}

inline void store_lanes(float* to, Lanes values) { _mm512_storeu_ps(to, values); }
inline void store_lanes(c10::BFloat16* to, Lanes values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(bf16_bits(values)));
}
inline void store_lanes(Mask mask, float* to, Lanes values) { _mm512_mask_storeu_ps(to, mask, values); }

// rounded() returns the nearest integer. times_power_of_two() returns x * 2^power, where power is an integer in [-151,
// 129].
inline Lanes rounded(Lanes x) { return _mm512_roundscale_ps(x, 0); }
inline Lanes times_power_of_two(Lanes x, Lanes power) { return _mm512_scalef_ps(x, power); }
inline Lanes between(Lanes x, float low, float high) {
  return _mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), x));
}

// Combines the lower and the upper eight lanes, then reduces these eight lanes by the AVX2 function.
inline float sum_of(Lanes values) {
  return lanes_avx2::sum_of(_mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1)));
}
inline float largest_of(Lanes values) {
  return lanes_avx2::largest_of(_mm256_max_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1)));
}

// Transposes a square of kLanes by kLanes numbers: rows[i] becomes column i.
inline void transpose(Lanes (&rows)[kLanes]) {
  Lanes other[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    other[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    other[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(other[4 * i + j]), b = _mm512_castps_pd(other[4 * i + 2 + j]);
      rows[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      rows[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    other[i] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
    other[i + 4] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
    other[i + 8] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
    other[i + 12] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0xdd);
  }
}

#include "tessera/kernels/simd/lanes_body.h"

#pragma GCC pop_options
#pragma GCC diagnostic pop

}  // namespace tessera::kernels::lanes_avx512
#endif
