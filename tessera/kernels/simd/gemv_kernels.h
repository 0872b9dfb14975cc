// The inner loops of batch_invariant_linear.h and paged_attention.h, compiled once for each set of vector instructions.
#pragma once

#include <c10/util/Half.h>

#include <bit>
#include <cstdint>

namespace tessera::kernels {

// y[i][j] = scales[j] * sum over k of x[i][k] weight[j][k]. x [m, k] and y [m, n] have strides in floats between rows;
// weight [n, k] is contiguous. scales may be null: 1.
template <class Weight>
using GemvFunction = void (*)(const float* x, int64_t m, int64_t x_stride, const Weight* weight, const float* scales,
                              int64_t n, int64_t k, float* y, int64_t y_stride);

// An fp16 weight. It has a type of its own, because uint16_t is the type of bfloat16 weights.
struct Float16 {
  uint16_t bits;
};

// 32 weights in GGUF's Q4_1 format: element i is d * (lower four bits of codes[i]) + m; element 16 + i uses the upper
// four bits. d is fp16 and a code has four bits, so the product is exact in fp32 and only the sum rounds.
struct Q4Block {
  static constexpr int64_t kElements = 32;
  uint16_t d, m;  // fp16
  uint8_t codes[16];
};
static_assert(sizeof(Q4Block) == 20);

inline float to_float(float value) { return value; }
inline float to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
inline float to_float(Float16 value) { return c10::detail::fp16_ieee_to_fp32_value(value.bits); }
inline float to_float(int8_t value) { return value; }

// Consecutive tokens of one sequence, with the query heads that share one KV head.
struct PagedHeadCall {
  const float* queries;  // of the first token: [group, head_dim]
  float* out;            // same layout as queries
  int64_t token_stride;  // floats from one token to the next, in queries and out
  int64_t tokens, group, head_dim;
  int64_t first_position, window;  // window 0: all earlier tokens
  float scale, softcap;
  const float* const* keys;  // per page: [page_tokens, head_dim]
  const float* const* values;
  int64_t page_tokens;  // a multiple of 16
  float* scratch;       // scratch_floats() floats
};
inline int64_t scratch_floats(int64_t rows, int64_t head_dim, int64_t page_tokens) {
  return rows * (2 * head_dim + page_tokens + 2);
}

struct GemvKernels {
  const char* name;
  GemvFunction<float> float32;
  GemvFunction<uint16_t> bfloat16;
  GemvFunction<Float16> float16;
  GemvFunction<int8_t> int8;
  GemvFunction<Q4Block> q4;  // k: a multiple of 32; scales unused
  void (*attend)(const PagedHeadCall& head);
  // out = activation(gate) * up; the activation is gelu (tanh form) where `gelu` is true, else silu.
  void (*gate)(const float* gate, const float* up, int64_t count, bool gelu, float* out);
};

// Returns a buffer of this thread with at least `floats` floats. The thread keeps the buffer for later calls.
float* thread_buffer(int64_t floats);

const GemvKernels& plain_gemv_kernels();
const GemvKernels& avx2_gemv_kernels();
const GemvKernels& avx512_gemv_kernels();
// Returns the kernels for the vector instructions of vector_level().
const GemvKernels& gemv_kernels();

}  // namespace tessera::kernels
