
#include <algorithm>
#include <cmath>

#include "tessera/kernels/simd/gemv_kernels.h"

#define ROW_TARGET

namespace tessera::kernels {
namespace plain_rows {
namespace {

// Vectors of eight floats in plain C++; the compiler maps them to the vector instructions of its target.
constexpr int kLanes = 8, kTileRows = 2, kTileColumns = 2, kByteColumns = 2, kWideColumns = 4, kTallRows = 0,
              kFewRows = 0, kQ4Rows = 2, kQ4Columns = 2, kQ4Wide = 8;
struct Lanes {
  float of[kLanes];
};

inline Lanes fill(float value) {
  Lanes lanes;
  for (float& lane : lanes.of) lane = value;
  return lanes;
}
inline Lanes zero() { return fill(0); }
template <class Weight>
Lanes load(const Weight* from) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes.of[i] = to_float(from[i]);
  return lanes;
}
struct Q4Scale {
  float d, m;
};
inline Q4Scale scale_of(const Q4Block& block) {
  return {c10::detail::fp16_ieee_to_fp32_value(block.d), c10::detail::fp16_ieee_to_fp32_value(block.m)};
}
// Decodes eight of a block's 32 elements. Parts 0 and 1 are the lower four bits of codes 0-7 and 8-15, parts 2 and 3
// the upper four bits of the same codes.
inline Lanes values_of(const Q4Block& block, Q4Scale scale, int part) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) {
    const int code = block.codes[part % 2 * kLanes + i] >> part / 2 * 4 & 15;
    lanes.of[i] = scale.d * static_cast<float>(code) + scale.m;
  }
  return lanes;
}
inline void store(float* to, const Lanes& lanes) { std::copy_n(lanes.of, kLanes, to); }
inline Lanes times(const Lanes& a, const Lanes& b) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes.of[i] = a.of[i] * b.of[i];
  return lanes;
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes.of[i] = a.of[i] * b.of[i] + c.of[i];
  return lanes;
}
inline float sum(const Lanes& lanes) {
  const float* a = lanes.of;
  // The lanes are added in the order in which the AVX2 code adds them.
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

#include "tessera/kernels/simd/gemv_kernels_body.h"

}  // namespace
}  // namespace plain_rows

const GemvKernels& plain_gemv_kernels() {
  static constexpr GemvKernels kernels = plain_rows::named("plain");
  return kernels;
}

}  // namespace tessera::kernels

#undef ROW_TARGET
