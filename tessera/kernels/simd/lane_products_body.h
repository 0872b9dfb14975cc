// Small fp32 matrix products in registers, and the copies of rows that they need, for attention on blocks of queries
// and keys. Included by attention_loops_body.h.

// Computes C = A B, or C += A B with `add`. A [R, count] has strides in both dims, B [count, kLanes N], C [R, kLanes
// N]. The loops over registers must be unrolled, else the compiler keeps `sums` in memory.
template <int R, int N>
inline void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, float* c, int64_t c_row,
                 int64_t count, bool add) {
  Lanes sums[R][N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = add ? load_lanes(c + r * c_row + n * kLanes) : fill(0);
  }
  for (int64_t i = 0; i < count; ++i) {
    Lanes right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) right[n] = load_lanes(b + i * b_row + n * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Lanes left = fill(a[r * a_row + i * a_step]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = fma(left, right[n], sums[r][n]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_lanes(c + r * c_row + n * kLanes, sums[r][n]);
  }
}

struct LeftMatrix {
  const float* data;
  int64_t row, step;
};
struct RightMatrix {
  const float* data;
  int64_t row;
};

template <int N>
void tiles(int64_t rows, int64_t count, const LeftMatrix& a, const RightMatrix& b, float* c, int64_t c_row, bool add) {
  int64_t r = 0;
  const auto rows_of = [&]<int R>(std::integral_constant<int, R>) __attribute__((always_inline)) {
    for (; r + R <= rows; r += R) {
      tile<R, N>(a.data + r * a.row, a.row, a.step, b.data, b.row, c + r * c_row, c_row, count, add);
    }
  };
  rows_of(std::integral_constant<int, kTileRows>());
  if constexpr (kTileRows > 4) rows_of(std::integral_constant<int, 4>());
  rows_of(std::integral_constant<int, 1>());
}

// Computes C [rows, width] = A [rows, count] B [count, width], or C += A B with `add`; width is a multiple of kLanes.
// The widest tiles come first; narrower ones cover the remaining columns.
inline void multiply(int64_t rows, int64_t width, int64_t count, const LeftMatrix& a, const RightMatrix& b, float* c,
                     int64_t c_row, bool add) {
  int64_t w = 0;
  const auto columns_of = [&]<int N>(std::integral_constant<int, N>) __attribute__((always_inline)) {
    for (; w + N * kLanes <= width; w += N * kLanes) tiles<N>(rows, count, a, {b.data + w, b.row}, c + w, c_row, add);
  };
  columns_of(std::integral_constant<int, kTileColumns>());
  if constexpr (kTileColumns > 3) columns_of(std::integral_constant<int, 3>());
  if constexpr (kTileColumns > 2) columns_of(std::integral_constant<int, 2>());
  columns_of(std::integral_constant<int, 1>());
}

// Copies the tokens of one head to fp32 [tokens, width]; `step` is the distance in elements from one token to the next
// in `from`.
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

// Transposes [tokens, width] into blocks [width, kBlock] of kBlock tokens each. The last block is filled with zeros.
inline void transpose_blocks(const float* from, int64_t tokens, int64_t width, float* to) {
  for (int64_t begin = 0; begin < tokens; begin += kBlock, to += width * kBlock) {
    const int64_t count = std::min(kBlock, tokens - begin);
    if (count < kBlock) std::fill_n(to, width * kBlock, 0.0F);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t i = 0; i < width; ++i) to[i * kBlock + t] = from[(begin + t) * width + i];
    }
  }
}
