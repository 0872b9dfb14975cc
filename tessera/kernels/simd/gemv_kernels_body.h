// Included by gemv_kernels_*.cc in a namespace of its own, without an include guard. The including file defines before
// the include: ROW_TARGET, Lanes, kLanes, load(), zero(), fill(), store(), fma(), sum(), scale_of() and values_of() for
// a Q4Block, kTileRows, kTileColumns, kByteColumns, kWideColumns, kTallRows (0: none), kFewRows, kQ4Rows, kQ4Columns,
// kQ4Wide. Loops of constant length are unrolled so that their sums stay in registers.
//
// Invariant: an element of y depends only on its row of x and its row of the weight. It is computed with kLanes partial
// sums, one per vector lane, over the first k / kLanes * kLanes products. These sums are added in a fixed order, then
// the remaining products one by one. The tiling of rows and columns does not change the element.

#define ROW_UNROLL _Pragma("GCC unroll 8")

// Prefetches kBytes of the weight's tile that is multiplied two tiles later. The hardware prefetcher misses this
// pattern: the rows are short and many are read at once. Prefetching past the end of the memory is harmless.
template <int64_t kBytes>
inline void prefetch_tile(uintptr_t& at) {
  ROW_UNROLL
  for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(reinterpret_cast<const void*>(at + line), 0, 2);
  at += kBytes;
}
constexpr int64_t kTilesAhead = 2;

// Computes kRows by kColumns elements of y. With kAhead the weight is prefetched; this is for a weight that is read
// from memory and not from the cache.
template <class Weight, int kRows, int kColumns, bool kAhead>
ROW_TARGET inline void tile(const float* x, int64_t x_stride, const Weight* weight, const float* scales, int64_t k,
                            float* y, int64_t y_stride) {
  Lanes sums[kRows][kColumns];
  ROW_UNROLL
  for (int i = 0; i < kRows; ++i) {
    ROW_UNROLL
    for (int j = 0; j < kColumns; ++j) sums[i][j] = zero();
  }
  const int64_t whole = k / kLanes * kLanes;
  auto ahead = reinterpret_cast<uintptr_t>(weight) + kTilesAhead * kColumns * k * sizeof(Weight);
  for (int64_t at = 0; at < whole; at += kLanes) {
    if constexpr (kAhead) prefetch_tile<kColumns * kLanes * sizeof(Weight)>(ahead);
    if constexpr (kRows == 1) {  // the row of x is in one register
      const Lanes row = load(x + at);
      ROW_UNROLL
      for (int j = 0; j < kColumns; ++j) sums[0][j] = fma(row, load(weight + j * k + at), sums[0][j]);
      continue;
    }
    Lanes columns[kColumns];
    ROW_UNROLL
    for (int j = 0; j < kColumns; ++j) columns[j] = load(weight + j * k + at);
    ROW_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Lanes row = load(x + i * x_stride + at);
      ROW_UNROLL
      for (int j = 0; j < kColumns; ++j) sums[i][j] = fma(row, columns[j], sums[i][j]);
    }
  }
  ROW_UNROLL
  for (int i = 0; i < kRows; ++i) {
    ROW_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      float value = sum(sums[i][j]);
      for (int64_t at = whole; at < k; ++at) value += x[i * x_stride + at] * to_float(weight[j * k + at]);
      y[i * y_stride + j] = scales != nullptr ? value * scales[j] : value;
    }
  }
}

// Computes the same sums in the same order as tile(), for a weight of Q4 blocks, which it decodes.
template <int kRows, int kColumns, bool kAhead>
ROW_TARGET inline void q4_tile(const float* x, int64_t x_stride, const Q4Block* weight, int64_t k, float* y,
                               int64_t y_stride) {
  Lanes sums[kRows][kColumns];
  ROW_UNROLL
  for (int i = 0; i < kRows; ++i) {
    ROW_UNROLL
    for (int j = 0; j < kColumns; ++j) sums[i][j] = zero();
  }
  const int64_t blocks = k / Q4Block::kElements;
  auto ahead = reinterpret_cast<uintptr_t>(weight) + kTilesAhead * kColumns * blocks * sizeof(Q4Block);
  for (int64_t at = 0; at < blocks; ++at) {
    if constexpr (kAhead) prefetch_tile<kColumns * sizeof(Q4Block)>(ahead);
    Q4Scale scales[kColumns];
    ROW_UNROLL
    for (int j = 0; j < kColumns; ++j) scales[j] = scale_of(weight[j * blocks + at]);
    ROW_UNROLL
    for (int part = 0; part < Q4Block::kElements / kLanes; ++part) {
      Lanes columns[kColumns];
      ROW_UNROLL
      for (int j = 0; j < kColumns; ++j) columns[j] = values_of(weight[j * blocks + at], scales[j], part);
      ROW_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Lanes row = load(x + i * x_stride + at * Q4Block::kElements + part * kLanes);
        ROW_UNROLL
        for (int j = 0; j < kColumns; ++j) sums[i][j] = fma(row, columns[j], sums[i][j]);
      }
    }
  }
  ROW_UNROLL
  for (int i = 0; i < kRows; ++i) {
    ROW_UNROLL
    for (int j = 0; j < kColumns; ++j) y[i * y_stride + j] = sum(sums[i][j]);
  }
}

template <int kRows, int kColumns, bool kAhead>
ROW_TARGET inline void q4_columns(const float* x, int64_t x_stride, const Q4Block* weight, int64_t n, int64_t k,
                                  float* y, int64_t y_stride) {
  const int64_t blocks = k / Q4Block::kElements;
  int64_t j = 0;
  for (; j + kColumns <= n; j += kColumns) {
    q4_tile<kRows, kColumns, kAhead>(x, x_stride, weight + j * blocks, k, y + j, y_stride);
  }
  for (; j < n; ++j) q4_tile<kRows, 1, kAhead>(x, x_stride, weight + j * blocks, k, y + j, y_stride);
}

template <class Weight, int kRows, int kColumns, bool kAhead>
ROW_TARGET inline void columns_of(const float* x, int64_t x_stride, const Weight* weight, const float* scales,
                                  int64_t n, int64_t k, float* y, int64_t y_stride) {
  int64_t j = 0;
  for (; j + kColumns <= n; j += kColumns) {
    tile<Weight, kRows, kColumns, kAhead>(x, x_stride, weight + j * k, scales ? scales + j : nullptr, k, y + j,
                                          y_stride);
  }
  for (; j < n; ++j) {
    tile<Weight, kRows, 1, kAhead>(x, x_stride, weight + j * k, scales ? scales + j : nullptr, k, y + j, y_stride);
  }
}

// The number of columns of a tile. 8-bit weights need registers for their conversion, so their tiles are narrower.
template <class Weight>
constexpr int kColumnsOf = sizeof(Weight) == 1 ? kByteColumns : kTileColumns;

// Returns the number of weight rows in a block that stays in the cache while it is multiplied with all rows of x. If x
// has kTileRows to kFewRows rows, a block has only kColumnsOf<Weight> weight rows (one for each column of a tile) and
// stays in the first-level cache; 8-bit weights are an exception and use the usual block.
template <class Weight>
int64_t cached_rows(int64_t m, int64_t k) {
  constexpr int64_t kFloats = int64_t{1} << 16, kColumns = kColumnsOf<Weight>;
  if (m >= kTileRows && m <= kFewRows && sizeof(Weight) > 1) return kColumns;
  return std::max<int64_t>(1, kFloats / std::max<int64_t>(1, k) / kColumns) * kColumns;
}

// Computes the products of all rows of x with one block of weight rows (see cached_rows). Only the first pass reads the
// block from memory, so only this pass prefetches.
template <class Weight, bool kFromMemory>
ROW_TARGET inline void block_products(const float* x, int64_t m, int64_t x_stride, const Weight* block,
                                      const float* scales, int64_t count, int64_t k, float* y, int64_t y_stride) {
  constexpr int kColumns = kColumnsOf<Weight>;
  int64_t i = 0;
  const auto pass = [&]<int kRows, int kOfTile, bool kAhead>() ROW_TARGET {
    columns_of<Weight, kRows, kOfTile, kAhead>(x + i * x_stride, x_stride, block, scales, count, k, y + i * y_stride,
                                               y_stride);
    i += kRows;
  };
  if (m >= kTileRows) {
    pass.template operator()<kTileRows, kColumns, kFromMemory>();
  } else if (m >= 2) {
    pass.template operator()<2, kColumns, kFromMemory>();
  }
  while (i + kTileRows <= m) pass.template operator()<kTileRows, kColumns, false>();
  while (i + 2 <= m) pass.template operator()<2, kColumns, false>();
  while (i < m) {
    if (count < kWideColumns) {
      pass.template operator()<1, kColumns, false>();
    } else {
      pass.template operator()<1, kWideColumns, false>();
    }
  }
}

// With at least this number of rows of x, a block of the weight is converted to fp32 once instead of in each tile. The
// values are the same.
constexpr int64_t kWidenRows = 32;

template <class Weight>
ROW_TARGET inline void convert_block(const Weight* from, int64_t count, float* to) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) store(to + at, load(from + at));
  for (; at < count; ++at) to[at] = to_float(from[at]);
}
ROW_TARGET inline void convert_block(const Q4Block* from, int64_t count, float* to) {
  for (int64_t at = 0; at < count; at += Q4Block::kElements, ++from) {
    const Q4Scale scale = scale_of(*from);
    ROW_UNROLL
    for (int part = 0; part < Q4Block::kElements / kLanes; ++part) {
      store(to + at + part * kLanes, values_of(*from, scale, part));
    }
  }
}

// The number of weights in one element of the storage type.
template <class Weight>
constexpr int64_t kNumbersOf = 1;
template <>
constexpr int64_t kNumbersOf<Q4Block> = Q4Block::kElements;

template <class Weight>
ROW_TARGET void widened_products(const float* x, int64_t m, int64_t x_stride, const Weight* weight, const float* scales,
                                 int64_t n, int64_t k, float* y, int64_t y_stride) {
  const int64_t block_rows = std::min(n, cached_rows<float>(m, k));
  float* const block = thread_buffer(block_rows * k);
  for (int64_t first = 0; first < n; first += block_rows) {
    const int64_t count = std::min(block_rows, n - first);
    convert_block(weight + first * (k / kNumbersOf<Weight>), count * k, block);
    block_products<float, false>(x, m, x_stride, block, scales ? scales + first : nullptr, count, k, y + first,
                                 y_stride);
  }
}

template <class Weight>
ROW_TARGET void products(const float* x, int64_t m, int64_t x_stride, const Weight* weight, const float* scales,
                         int64_t n, int64_t k, float* y, int64_t y_stride) {
  constexpr bool kIsWide = std::is_same_v<Weight, float>;
  if (m == 1) return columns_of<Weight, 1, kWideColumns, true>(x, x_stride, weight, scales, n, k, y, y_stride);
  // The time of an fp32 product is the time to read the weight, so all kTallRows rows of x are in one tile, and the
  // weight is read in one pass.
  if (kIsWide && kTallRows > 0 && m == kTallRows) {
    return columns_of<Weight, std::max(kTallRows, 1), 2, true>(x, x_stride, weight, scales, n, k, y, y_stride);
  }
  if constexpr (!kIsWide) {
    if (m >= kWidenRows) return widened_products(x, m, x_stride, weight, scales, n, k, y, y_stride);
  }
  const int64_t block_rows = cached_rows<Weight>(m, k);
  for (int64_t first = 0; first < n; first += block_rows) {
    block_products<Weight, true>(x, m, x_stride, weight + first * k, scales ? scales + first : nullptr,
                                 std::min(block_rows, n - first), k, y + first, y_stride);
  }
}

// A tile is a block of rows and columns of y. Each tile decodes the Q4 blocks of its columns again, and decoding takes
// more time than reading the blocks. Of the tile sizes whose sums fit into registers, those given by kQ4Rows,
// kQ4Columns and kQ4Wide are the fastest.
ROW_TARGET void q4_products(const float* x, int64_t m, int64_t x_stride, const Q4Block* weight, const float* scales,
                            int64_t n, int64_t k, float* y, int64_t y_stride) {
  if (m >= kWidenRows) return widened_products(x, m, x_stride, weight, scales, n, k, y, y_stride);
  int64_t i = 0;
  for (; i + kQ4Rows <= m; i += kQ4Rows) {
    q4_columns<kQ4Rows, kQ4Columns, true>(x + i * x_stride, x_stride, weight, n, k, y + i * y_stride, y_stride);
  }
  if constexpr (kQ4Rows > 4) {
    for (; i + 4 <= m; i += 4) {
      q4_columns<4, 2, true>(x + i * x_stride, x_stride, weight, n, k, y + i * y_stride, y_stride);
    }
  }
  for (; i + 2 <= m; i += 2) {
    q4_columns<2, kQ4Wide / 2, true>(x + i * x_stride, x_stride, weight, n, k, y + i * y_stride, y_stride);
  }
  for (; i < m; ++i) q4_columns<1, kQ4Wide, true>(x + i * x_stride, x_stride, weight, n, k, y + i * y_stride, y_stride);
}

// e^x within 2 units in the last place. Inputs below -87 count as -87, inputs above 88 as 88.
ROW_TARGET inline float exponential(float x) {
  x = x < -87.0F ? -87.0F : (x > 88.0F ? 88.0F : x);
  const float shifted = x * 1.44269504F + 12582912.0F;  // 1.5 * 2^23: rounds to the nearest integer
  const float n = shifted - 12582912.0F;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

ROW_TARGET void gate_row(const float* gate, const float* up, int64_t count, bool gelu, float* out) {
  if (gelu) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float x = gate[i], inner = 0.7978845608F * (x + 0.044715F * x * x * x);
      out[i] = x * (1.0F - 1.0F / (1.0F + exponential(2.0F * inner))) * up[i];  // (1 + tanh(inner)) / 2
    }
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = gate[i] / (1.0F + exponential(-gate[i])) * up[i];
}

// Computes out = out * factor + weights [count] * values [count, width] (a matrix product).
ROW_TARGET inline void add_values(const float* weights, const float* values, int64_t count, int64_t width, float factor,
                                  float* out) {
  int64_t at = 0;
  const Lanes scale = fill(factor);
  const auto chunk = [&]<int kParts>(std::integral_constant<int, kParts>) ROW_TARGET {
    Lanes sums[kParts];
    ROW_UNROLL
    for (int part = 0; part < kParts; ++part) sums[part] = times(load(out + at + part * kLanes), scale);
    for (int64_t j = 0; j < count; ++j) {
      const Lanes weight = fill(weights[j]);
      ROW_UNROLL
      for (int part = 0; part < kParts; ++part) {
        sums[part] = fma(weight, load(values + j * width + at + part * kLanes), sums[part]);
      }
    }
    ROW_UNROLL
    for (int part = 0; part < kParts; ++part) store(out + at + part * kLanes, sums[part]);
  };
  for (; at + 8 * kLanes <= width; at += 8 * kLanes) chunk(std::integral_constant<int, 8>());
  for (; at + 4 * kLanes <= width; at += 4 * kLanes) chunk(std::integral_constant<int, 4>());
  for (; at + kLanes <= width; at += kLanes) chunk(std::integral_constant<int, 1>());
  for (; at < width; ++at) {
    float value = out[at] * factor;
    for (int64_t j = 0; j < count; ++j) value += weights[j] * values[j * width + at];
    out[at] = value;
  }
}

// Online softmax over the pages: computes the scores of a page, updates the running maximum, rescales the sums to it
// and adds the page's values. A page's rows are in position order, so every query adds its keys in the same order,
// whatever other queries are in the call.
ROW_TARGET void attend_head(const PagedHeadCall& head) {
  const int64_t rows = head.tokens * head.group, d = head.head_dim, page = head.page_tokens;
  float *queries = head.scratch, *sums = queries + rows * d, *scores = sums + rows * d;
  float *running_max = scores + rows * page, *total = running_max + rows;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = head.queries + row / head.group * head.token_stride + row % head.group * d;
    for (int64_t i = 0; i < d; ++i) queries[row * d + i] = from[i] * head.scale;
    std::fill_n(sums + row * d, d, 0.0F);
    running_max[row] = -std::numeric_limits<float>::infinity();
    total[row] = 0;
  }
  const auto first_visible = [&](int64_t position) {
    return head.window > 0 ? std::max<int64_t>(0, position - head.window + 1) : 0;
  };
  const int64_t end = head.first_position + head.tokens;
  for (int64_t index = first_visible(head.first_position) / page; index * page < end; ++index) {
    const int64_t begin = index * page, filled = std::min(page, end - begin);
    products<float>(queries, rows, d, head.keys[index], nullptr, filled, d, scores, page);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = head.first_position + row / head.group;
      const int64_t low = std::max<int64_t>(0, first_visible(position) - begin), high = position + 1 - begin;
      float* score = scores + row * page;
      if (low >= filled || high <= 0) continue;
      if (head.softcap > 0) {
        for (int64_t j = 0; j < filled; ++j) {
          score[j] = head.softcap * (1.0F - 2.0F / (1.0F + exponential(2.0F * score[j] / head.softcap)));
        }
      }
      float largest = running_max[row];
      for (int64_t j = 0; j < page; ++j) {
        if (j < low || j >= high) {
          score[j] = -std::numeric_limits<float>::infinity();
        } else {
          largest = std::max(largest, score[j]);
        }
      }
      const float factor = exponential(running_max[row] - largest);
      running_max[row] = largest;
      float weights = 0;
#pragma omp simd
      for (int64_t j = 0; j < page; ++j) score[j] = exponential(score[j] - largest);
      for (int64_t j = 0; j < page; ++j) {
        if (j < low || j >= high) score[j] = 0;
        weights += score[j];
      }
      total[row] = total[row] * factor + weights;
      // Only the values of visible keys are read. An unused slot of the page may hold NaN or infinity, and weight 0
      // times it would be NaN.
      const int64_t last = std::min(high, filled);
      add_values(score + low, head.values[index] + low * d, last - low, d, factor, sums + row * d);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* to = head.out + row / head.group * head.token_stride + row % head.group * d;
    for (int64_t i = 0; i < d; ++i) to[i] = sums[row * d + i] / total[row];
  }
}

constexpr GemvKernels named(const char* name) {
  return {name,        products<float>, products<uint16_t>, products<Float16>, products<int8_t>, q4_products,
          attend_head, gate_row};
}

#undef ROW_UNROLL
