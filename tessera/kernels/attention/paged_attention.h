// Attention over a KV cache in pages, for several sequences at once.
//
//   paged_attention({.queries = q, .keys = key_pages, .values = value_pages, .sequences = sequences});
//
// The result of a token depends only on the keys that it sees, bit for bit. Each query reads its keys page by page in a
// fixed order, whatever other sequences or tokens the call computes. fp32 on the CPU, no derivative. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace tessera::kernels {

inline constexpr int64_t kPageTokens = 16;

// Consecutive tokens of one sequence that this call computes.
struct PagedSequence {
  int64_t first_row = 0;             // row of the first token in `queries`
  int64_t rows = 0;                  // number of tokens
  int64_t first_position = 0;        // position of the first token in the sequence
  std::span<const int32_t> pages{};  // numbers of the sequence's pages up to these tokens, in order
};

struct PagedAttentionCall {
  at::Tensor queries{};  // [N, heads, head_dim], contiguous
  at::Tensor keys{};     // [pages, kv_heads, kPageTokens, head_dim]; each page contiguous
  at::Tensor values{};
  std::span<const PagedSequence> sequences{};
  int64_t window = 0;  // number of tokens that a token sees, itself included; 0: all earlier ones
  double scale = 0;    // factor of the scores; 0: 1 / sqrt(head_dim)
  double softcap = 0;  // scores become softcap * tanh(score / softcap); 0: no cap
};
// Returns [N, heads, head_dim]. The caller has already written the keys and values of these tokens into the pages.
// Error kShape for tensors of other shapes.
at::Tensor paged_attention(const PagedAttentionCall& call);

}  // namespace tessera::kernels
