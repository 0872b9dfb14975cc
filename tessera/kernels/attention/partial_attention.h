// Attention to a part of the keys, with what joins the results of several parts: the log sums of exponentials of
// scores.
//
//   AttentionPart first = attend_part(q, k0, v0, {}), second = attend_part(q, k1, v1, {.causal = true});
//   AttentionSums sums(q);
//   sums.add(first, 0, 0); sums.add(second, 0, 0);
//   at::Tensor y = sums.joined().out.to(q.scalar_type());       // softmax over the keys of both
//
// The results are joined in float32 (float64 of float64) by
//   out += sigmoid(log_sums of the part - log_sums) (out of the part - out),
// the stable form of the weighted mean. The backward of each part reads the joined result and log sums alone. Fused on
// the CPU, and without a mask where kernels/attention/flash_attention.h runs; elsewhere, and for capped scores, from
// products, with the scores of 1024 queries in memory at a time. Without autograd: the caller's function is what has a
// derivative. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::kernels {

struct AttentionPartOptions {
  bool causal = false;                            // query i sees keys 0 to i; as many keys as queries
  std::optional<at::Tensor> mask = std::nullopt;  // [T, S], added to the scores
  double scale = 0;                               // 0: one over the square root of the head's size
  double softcap = 0;                             // scores are softcap * tanh(score / softcap); 0: as they are
};

struct AttentionPart {
  at::Tensor out;       // [B, H, T, d] in the queries' dtype
  at::Tensor log_sums;  // [B, H, T], float32 or float64
};

// q [B, H, T, d]; k and v [B, G, S, d], H a multiple of G, T and S at least 1.
AttentionPart attend_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionPartOptions& options);

struct AttentionPartGradients {
  at::Tensor q, k, v;  // in the dtype of theirs or wider; k and v [B, G, S, d]
};
// What the part adds to the gradients, where `whole` is the joined result over all parts.
AttentionPartGradients attend_part_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, const AttentionPart& whole,
                                            const AttentionPartOptions& options);

// The joined result of parts. Queries of which no part was added are 0, with log sums of minus infinity.
class AttentionSums {
 public:
  explicit AttentionSums(const at::Tensor& queries) : queries_(queries) {}
  // The part of rows [row, ...) and queries [query, ...). A first one of all queries may become the result itself.
  void add(const AttentionPart& part, int64_t row, int64_t query);
  // [B, H, T, d], the tokens before the heads in memory, in the dtype of sums; [B, H, T].
  AttentionPart joined();

 private:
  struct Place {
    int64_t row, rows, query, queries;
    bool overlaps(const Place& other) const;
  };
  void begin();
  at::Tensor queries_, out_, log_sums_;
  std::vector<Place> added_;
};

}  // namespace tessera::kernels
