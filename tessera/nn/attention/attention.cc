#include "tessera/nn/attention/attention.h"

#include "tessera/kernels/rows/rotary.h"

namespace tessera::nn {

Attention::Attention(const AttentionOptions& attention, const ParameterOptions& options) : attention_(attention) {
  const int64_t inner = attention.heads * attention.head_dim, kv_inner = attention.kv_heads * attention.head_dim;
  register_module("q_proj", q_proj, std::make_shared<Linear>(attention.width, inner, attention.qkv_bias, options));
  register_module("k_proj", k_proj, std::make_shared<Linear>(attention.width, kv_inner, attention.qkv_bias, options));
  register_module("v_proj", v_proj, std::make_shared<Linear>(attention.width, kv_inner, attention.qkv_bias, options));
  register_module("o_proj", o_proj, std::make_shared<Linear>(inner, attention.width, attention.output_bias, options));
  if (!attention.qk_norm) return;
  register_module("q_norm", q_norm, std::make_shared<RMSNorm>(attention.head_dim, *attention.qk_norm, options));
  register_module("k_norm", k_norm, std::make_shared<RMSNorm>(attention.head_dim, *attention.qk_norm, options));
}

at::Tensor Attention::forward(const at::Tensor& x, const AttentionContext& context) {
  const auto q = (*q_proj)(x), k = (*k_proj)(x), v = (*v_proj)(x);
  return (*o_proj)(attend_heads(q, k, v, context));
}

at::Tensor Attention::attend_heads(const at::Tensor& of_q, const at::Tensor& of_k, const at::Tensor& of_v,
                                   const AttentionContext& context) {
  const auto& [cos, sin] = context.angles;
  // -1: view() infers the number of this rank's heads, which is smaller than attention_.heads under tensor parallelism.
  const auto heads = [this](const at::Tensor& projected) {
    return projected.view({projected.size(0), projected.size(1), -1, attention_.head_dim});
  };
  auto q = heads(of_q), k = heads(of_k), v = heads(of_v);
  if (q_norm) q = (*q_norm)(q);
  if (k_norm) k = (*k_norm)(k);
  q = kernels::rotary(q, cos, sin);
  k = kernels::rotary(k, cos, sin);
  if (context.paged) {
    const auto y = context.paged->attend(attention_.layer, q, k, v, context.pattern.sliding_window, attention_.scores);
    return y.reshape({y.size(0), y.size(1), -1});
  }
  const auto y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context.pattern, attention_.scores)
                     .transpose(1, 2);
  return y.reshape({y.size(0), y.size(1), -1});
}

}  // namespace tessera::nn
