// Attention by the fused kernels of accelerators: flash attention in 16 bits, memory-efficient attention in float32.
//
//   if (kernels::supports_flash_attention(q, k, v)) {
//     y = kernels::flash_attention(q, k, v, {.begins = begins, .longest = 512});
//   }
//
// Packed documents follow one another in one dim; `begins` marks their borders. Keys outside of a document or a window
// are skipped, without a mask.
//
// With `begins`: q [N, H, d], k and v [N, G, d], H a multiple of G, N the tokens of all documents; y is [N, H, d].
// Without `begins`: q [B, T, H, d], k and v [B, S, G, d]; each row is one document. Inside selective activation
// checkpointing the result is kept (kernels/autograd/activation_checkpoint_cache.h). First derivative only. Plain
// tensors. Thread-safe. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace tessera::kernels {

struct FlashOptions {
  at::Tensor begins{};  // cumulative lengths (cu_seqlens), int32 [documents + 1] on the device of q
  int64_t longest = 0;  // tokens of the longest document; unused without `begins`
  bool causal = true;   // a query sees its own and earlier tokens; needs as many keys as queries
  int64_t window = 0;   // with causal: a query sees its own token and window - 1 earlier ones; 0: all
  double scale = 0;     // 0: 1 / sqrt(d)
};

// Returns whether the device has the kernels for this dtype. The first call per device and dtype runs the kernels once
// to find out; the host does not wait for them.
bool has_flash_attention(c10::Device device, at::ScalarType dtype);
// Returns whether the kernels support heads of this size: a multiple of 8, at most 256.
bool supports_flash_head_dim(int64_t head_dim);
// Returns whether flash_attention runs for these tensors: device, dtype and head size. Tensors with gaps in the last
// dim are copied.
bool supports_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options);

// Forward and backward without autograd. log_sums: float32 [B, H, T]. With `begins` the device's kernel defines the
// shape of log_sums; memory-efficient attention returns [documents, H, at least longest].
struct FlashResult {
  at::Tensor out, log_sums;
};
FlashResult flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options);
// Returns the gradients of q, k and v. `result` may be the combined result of several calls with different parts of the
// keys (kernels/attention/partial_attention.h).
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                              const at::Tensor& k, const at::Tensor& v,
                                                              const FlashResult& result, const FlashOptions& options);

}  // namespace tessera::kernels
