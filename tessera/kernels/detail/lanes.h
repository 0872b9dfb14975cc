// Sixteen fp32 numbers at a time, for loops written for AVX-512: loads and stores of fp32 and bf16, exponentials.
//
// Use it in functions of the same target, called only where has_lanes():
//
//   #pragma GCC push_options
//   #pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
//   ...
//   #pragma GCC pop_options
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

#if defined(__x86_64__) && !defined(__clang__)  // clang has no target by region
#define TESSERA_HAS_LANES
#include <immintrin.h>

namespace tessera::detail {

inline bool has_lanes() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of what GCC 12's own headers leave undefined
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

constexpr int64_t kLanes = 16;
using Lanes = __m512;

inline Lanes load_lanes(const float* from) { return _mm512_loadu_ps(from); }
inline Lanes load_lanes(const c10::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Rounded to bf16: to the nearest, ties to even, as c10 does; NaN stays NaN.
inline __m512i bf16_bits(Lanes values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
}
// As a T has it.
template <class T>
Lanes rounded_to(Lanes values) {
  if constexpr (std::is_same_v<T, float>) return values;
  return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(values), 16));
}

inline void store_lanes(float* to, Lanes values) { _mm512_storeu_ps(to, values); }
inline void store_lanes(c10::BFloat16* to, Lanes values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(bf16_bits(values)));
}

// Through memory: GCC 12 warns of its own reductions.
inline float sum_of(Lanes values) {
  float each[kLanes];
  store_lanes(each, values);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) each[i] += each[i + half];
  }
  return each[0];
}
inline float largest_of(Lanes values) {
  float each[kLanes];
  store_lanes(each, values);
  float most = each[0];
  for (const float value : each) most = value > most ? value : most;
  return most;
}

// e^x to about one unit in the last place; 0 of -inf, NaN of NaN.
inline Lanes exp_lanes(Lanes x) {
  const Lanes high = _mm512_set1_ps(1.44269502F), low = _mm512_set1_ps(1.92596300e-8F);  // log2(e)
  const Lanes bounded = _mm512_max_ps(_mm512_set1_ps(-104.0F), _mm512_min_ps(_mm512_set1_ps(89.0F), x));
  const Lanes power = _mm512_roundscale_ps(_mm512_mul_ps(bounded, high), 0);
  const Lanes rest = _mm512_fmadd_ps(bounded, low, _mm512_fmsub_ps(bounded, high, power));
  Lanes sum = _mm512_set1_ps(1.52527338e-5F);  // ln(2)^k / k!
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.54035304e-4F));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.33335581e-3F));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.61812911e-3F));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.55041087e-2F));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.40226507e-1F));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.93147181e-1F));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0F));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(sum, power), nan, x);
}

// The first `count` lanes, the others not touched.
inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1U << count) - 1U);
}

#pragma GCC pop_options
#pragma GCC diagnostic pop

}  // namespace tessera::detail
#else
namespace tessera::detail {
inline bool has_lanes() { return false; }
}  // namespace tessera::detail
#endif
