// The inner loops of row_product.h and paged_attention.h, once for each set of vector instructions.
#pragma once

#include <c10/util/Half.h>

#include <bit>
#include <cstdint>

namespace tessera::kernels {

// y[i][j] = scales[j] * sum over k of x[i][k] weight[j][k], rows of x and y so many floats apart, those of the weight
// `k`. scales may be null: ones.
template <class Weight>
using RowProducts = void (*)(const float* x, int64_t m, int64_t x_stride, const Weight* weight, const float* scales,
                             int64_t n, int64_t k, float* y, int64_t y_stride);

// A weight in fp16, whose bits a bfloat16 would be otherwise.
struct Float16 {
  uint16_t bits;
};

// 32 weights in GGUF's Q4_1: element i is d * (the low half of codes[i]) + m, element 16 + i of the upper half. Exact
// in fp32 but for the sum's rounding: d is fp16 and a code has four bits.
struct Q4Block {
  static constexpr int64_t kElements = 32;
  uint16_t d, m;  // fp16
  uint8_t codes[16];
};
static_assert(sizeof(Q4Block) == 20);

inline float widened(float value) { return value; }
inline float widened(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
inline float widened(Float16 value) { return c10::detail::fp16_ieee_to_fp32_value(value.bits); }
inline float widened(int8_t value) { return value; }

// Some tokens of one sequence in a row, with the query heads that share a key head.
struct PagedHead {
  const float* queries;  // of the first token: [group, head_dim]
  float* out;            // the same places
  int64_t token_stride;  // floats between tokens, in both
  int64_t tokens, group, head_dim;
  int64_t first_position, window;  // window 0: all that is before
  float scale, softcap;
  const float* const* keys;  // of each page [page_tokens, head_dim]
  const float* const* values;
  int64_t page_tokens;  // a multiple of 16
  float* scratch;       // scratch_floats()
};
inline int64_t scratch_floats(int64_t rows, int64_t head_dim, int64_t page_tokens) {
  return rows * (2 * head_dim + page_tokens + 2);
}

struct RowKernels {
  const char* name;
  RowProducts<float> float32;
  RowProducts<uint16_t> bfloat16;
  RowProducts<Float16> float16;
  RowProducts<int8_t> int8;
  RowProducts<Q4Block> q4;  // k: whole blocks; no scales
  void (*attend)(const PagedHead& head);
  // out = activation(gate) * up; gelu: by its tanh form, else silu.
  void (*gate)(const float* gate, const float* up, int64_t count, bool gelu, float* out);
};

// A buffer of this thread, of at least so many floats, which it keeps.
float* widening_room(int64_t floats);

const RowKernels& plain_row_kernels();
const RowKernels& avx2_row_kernels();
const RowKernels& avx512_row_kernels();
// Those of vector_level().
const RowKernels& row_kernels();

}  // namespace tessera::kernels
