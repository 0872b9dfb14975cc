// Attention over keys and values that lie in pages, of several sequences at once.
//
//   paged_attention({.queries = q, .pages = keys_and_values, .sequences = ..., .window = 0});
//
// What a token gets depends on the keys that it sees and nothing else, bit for bit: they are gone through page by page,
// whatever sequences or tokens are computed beside it. fp32 on the CPU, no derivative. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace tessera::kernels {

inline constexpr int64_t kPageTokens = 16;

// Tokens of one sequence that are computed now, in a row.
struct PagedTokens {
  int64_t first_row = 0;             // its first one's place among all rows of this call
  int64_t rows = 0;                  // how many
  int64_t first_position = 0;        // its first one's place in the sequence
  std::span<const int32_t> pages{};  // that hold the sequence, these tokens included
};

struct PagedAttention {
  at::Tensor queries{};  // [N, heads, head_dim], contiguous
  at::Tensor keys{};     // [pages, kv_heads, kPageTokens, head_dim]; each page contiguous
  at::Tensor values{};
  std::span<const PagedTokens> sequences{};
  int64_t window = 0;  // tokens that a token sees, itself included; 0: all before it
  double scale = 0;    // of scores; 0: one over the square root of head_dim
  double softcap = 0;  // 0: none
};
// [N, heads, head_dim]. The pages hold the keys of these tokens already.
at::Tensor paged_attention(const PagedAttention& wanted);

}  // namespace tessera::kernels
