// Attention to a part of the keys, and the combination of such partial results (as in ring attention).
//
//   PartialAttention first = partial_attention_forward(q, k0, v0, {});
//   PartialAttention second = partial_attention_forward(q, k1, v1, {.causal = true});
//   PartialAttentionMerger merger(q);
//   merger.add(first, 0, 0);
//   merger.add(second, 0, 0);
//   at::Tensor y = merger.merged().out.to(q.scalar_type());       // softmax over the keys of both
//
// A partial result has its log-sum-exp of scores (log_sums). Partial results are combined in float32 (float64 for
// float64) by the stable form of the weighted mean,
//   out += sigmoid(log_sums of the part - log_sums) (out of the part - out).
// The backward of each part needs only the combined result and log sums.
//
// Fused kernels run on the CPU, and on accelerators for parts without a mask (kernels/attention/flash_attention.h).
// Other parts, and scores with a softcap, use matrix products with the scores of 1024 queries in memory at a time. No
// autograd: the caller's autograd function has the derivative. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::kernels {

struct PartialAttentionOptions {
  bool causal = false;                            // query i sees keys 0 to i; as many keys as queries
  std::optional<at::Tensor> mask = std::nullopt;  // [T, S], added to the scores
  double scale = 0;                               // 0: 1 / sqrt(d)
  double softcap = 0;                             // scores become softcap * tanh(score / softcap); 0: no cap
};

struct PartialAttention {
  at::Tensor out;       // [B, H, T, d] in the queries' dtype
  at::Tensor log_sums;  // [B, H, T], float32 or float64
};

// Computes the attention of q to one part of the keys. q [B, H, T, d]; k and v [B, G, S, d], H a multiple of G, T and S
// at least 1.
PartialAttention partial_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const PartialAttentionOptions& options);

struct PartialAttentionGradients {
  at::Tensor q, k, v;  // in the dtype of q, k and v or wider; k and v [B, G, S, d]
};
// Returns the contribution of this part of the keys to the gradients. `whole` is the combined result over all parts.
PartialAttentionGradients partial_attention_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                     const at::Tensor& k, const at::Tensor& v,
                                                     const PartialAttention& whole,
                                                     const PartialAttentionOptions& options);

// Combines partial results. A query that no part contains gets the result 0 and log sums of minus infinity.
class PartialAttentionMerger {
 public:
  explicit PartialAttentionMerger(const at::Tensor& queries) : queries_(queries) {}
  // Adds a partial result that begins at batch row `row` and at query `query`. A first part that covers all queries may
  // become the result without a copy.
  void add(const PartialAttention& part, int64_t row, int64_t query);
  // Returns out [B, H, T, d] (memory layout [B, T, H, d]) and log sums [B, H, T], in float32 (float64 for float64).
  PartialAttention merged();

 private:
  struct MergedRegion {
    int64_t row, rows, query, queries;
    bool overlaps(const MergedRegion& other) const;
  };
  void begin();
  at::Tensor queries_, out_, log_sums_;
  std::vector<MergedRegion> added_;
};

}  // namespace tessera::kernels
