// Attention by the kernels that accelerators have for it, flash attention in 16 bits and memory-efficient attention in
// float32: documents laid end to end are told by where they begin, and what is outside of them and of windows is
// neither computed nor masked.
//
//   if (kernels::runs_flash_attention(q, k, v)) y = kernels::flash_attention(q, k, v, {.begins = begins, .longest =
//   512});
//
// q [N, H, d], k and v [N, G, d], H a multiple of G, N the tokens of all documents: y [N, H, d]. Without `begins` q is
// [B, T, H, d], k and v [B, S, G, d], rows of one document each. Results are kept where kept_results.h says so. One
// derivative, no second one. Plain tensors. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::kernels {

struct FlashOptions {
  at::Tensor begins{};  // int32 [documents + 1] on the device of q: where each begins, and where the last one ends
  int64_t longest = 0;  // tokens of the longest document; unused without `begins`
  bool causal = true;   // a query sees itself and what is before it; needs as many keys as queries
  int64_t window = 0;   // of that, window - 1 tokens before it; 0: all
  double scale = 0;     // 0: one over the square root of the head's size
};

// Whether a device has the kernels for this dtype. Tries them once, without a wait of the host.
bool has_flash_attention(c10::Device device, at::ScalarType dtype);
bool takes_flash_heads(int64_t head_dim);
// And whether they take heads of this size. Last dims lie without gaps, or are copied.
bool runs_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options);

// Without autograd. log_sums: float32 [B, H, T]; with `begins` as the device's kernel lays them, which in float32 is
// room for the longest document in each: [documents, H, at least longest].
struct FlashResult {
  at::Tensor out, log_sums;
};
FlashResult flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options);
// Of q, k and v. `result` may be the joined one over several parts of the keys.
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                              const at::Tensor& k, const at::Tensor& v,
                                                              const FlashResult& result, const FlashOptions& options);

}  // namespace tessera::kernels
