// Small matrix products of fp32 in registers, and the moves of rows that they need: what attention does to a block of
// queries and keys. Called only where has_lanes().
#pragma once

#include <algorithm>

#include "tessera/kernels/detail/lanes.h"

#ifdef TESSERA_HAS_LANES
namespace tessera::detail {

constexpr int64_t kBlock = 64;  // queries and keys of a block of scores

inline int64_t padded(int64_t tokens) { return (tokens + kBlock - 1) / kBlock * kBlock; }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of what GCC 12's own headers leave undefined
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

// C [R, 16 N] (+)= A B, A [R, count] with strides, B [count, 16 N].
// Loops over registers have to be unrolled, or the registers lie in memory.
template <int R, int N>
inline void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, float* c, int64_t c_row,
                 int64_t count, bool add) {
  Lanes sums[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = add ? load_lanes(c + r * c_row + n * kLanes) : _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < count; ++i) {
    Lanes right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) right[n] = load_lanes(b + i * b_row + n * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Lanes left = _mm512_set1_ps(a[r * a_row + i * a_step]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = _mm512_fmadd_ps(left, right[n], sums[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_lanes(c + r * c_row + n * kLanes, sums[r][n]);
  }
}

struct Left {
  const float* data;
  int64_t row, step;
};
struct Right {
  const float* data;
  int64_t row;
};

template <int N>
void tiles(int64_t rows, int64_t count, const Left& a, const Right& b, float* c, int64_t c_row, bool add) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    tile<4, N>(a.data + r * a.row, a.row, a.step, b.data, b.row, c + r * c_row, c_row, count, add);
  }
  for (; r < rows; ++r) {
    tile<1, N>(a.data + r * a.row, a.row, a.step, b.data, b.row, c + r * c_row, c_row, count, add);
  }
}

// C [rows, width] (+)= A [rows, count] B [count, width]; width a multiple of 16.
inline void multiply(int64_t rows, int64_t width, int64_t count, const Left& a, const Right& b, float* c, int64_t c_row,
                     bool add) {
  for (int64_t w = 0; w < width; w += 4 * kLanes) {
    const Right part{b.data + w, b.row};
    switch (std::min<int64_t>(4, (width - w) / kLanes)) {
      case 1:
        tiles<1>(rows, count, a, part, c + w, c_row, add);
        break;
      case 2:
        tiles<2>(rows, count, a, part, c + w, c_row, add);
        break;
      case 3:
        tiles<3>(rows, count, a, part, c + w, c_row, add);
        break;
      default:
        tiles<4>(rows, count, a, part, c + w, c_row, add);
        break;
    }
  }
}

// Tokens of one head in fp32, [tokens, width].
template <class T>
void gather(const T* from, int64_t step, int64_t tokens, int64_t width, float* to) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < width; i += kLanes) store_lanes(to + t * width + i, load_lanes(from + t * step + i));
  }
}

template <class T>
void scatter(const float* from, int64_t step, int64_t tokens, int64_t width, T* to) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < width; i += kLanes) store_lanes(to + t * step + i, load_lanes(from + t * width + i));
  }
}

// [tokens, width] as blocks [width, kBlock], zero behind the last token.
inline void transpose_blocks(const float* from, int64_t tokens, int64_t width, float* to) {
  for (int64_t begin = 0; begin < tokens; begin += kBlock, to += width * kBlock) {
    const int64_t count = std::min(kBlock, tokens - begin);
    if (count < kBlock) std::fill_n(to, width * kBlock, 0.0F);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t i = 0; i < width; ++i) to[i * kBlock + t] = from[(begin + t) * width + i];
    }
  }
}

#pragma GCC pop_options
#pragma GCC diagnostic pop

}  // namespace tessera::detail
#endif
