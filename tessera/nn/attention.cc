#include "tessera/nn/attention.h"

#include <limits>

#include "tessera/base/error.h"
#include "tessera/kernels/rotary.h"

namespace tessera::nn {

at::Tensor attention_mask(const at::Tensor& document_ids, const AttentionMaskOptions& mask,
                          const at::TensorOptions& options) {
  const int64_t total = mask.cached + mask.tokens;
  const bool windowed = mask.sliding_window > 0 && mask.sliding_window < total;
  at::Tensor documents = document_ids;
  if (documents.defined()) {
    TESSERA_CHECK(mask.cached == 0, ErrorKind::kShape,
                  "[nn.attention] document ids with {} cached tokens: a cache holds one document a row", mask.cached);
    TESSERA_CHECK(documents.dim() == 2 && documents.size(0) == mask.rows && documents.size(1) == mask.tokens,
                  ErrorKind::kShape, "[nn.attention] document ids have {} elements, wanted [{}, {}]", documents.numel(),
                  mask.rows, mask.tokens);
    if (documents.eq(documents.narrow(1, 0, 1)).all().item<bool>()) documents.reset();
  }
  const bool causal_says_all = mask.cached == 0 || mask.tokens == 1;
  if (!documents.defined() && !windowed && causal_says_all) return {};
  const auto indices = at::TensorOptions().dtype(at::kLong).device(options.device());
  const auto query = at::arange(mask.cached, total, indices).unsqueeze(1);
  const auto key = at::arange(total, indices).unsqueeze(0);
  auto allowed = key.le(query);
  if (windowed) allowed.logical_and_(key.gt(query - mask.sliding_window));
  allowed = allowed.unsqueeze(0);
  if (documents.defined()) allowed = allowed.logical_and(documents.unsqueeze(2).eq(documents.unsqueeze(1)));
  return at::zeros(allowed.sizes(), options)
      .masked_fill_(allowed.logical_not(), -std::numeric_limits<double>::infinity())
      .unsqueeze(1);
}

Attention::Attention(const AttentionOptions& attention, const ParameterOptions& options) : attention_(attention) {
  const int64_t inner = attention.heads * attention.head_dim, kv_inner = attention.kv_heads * attention.head_dim;
  q_proj = register_module("q_proj", std::make_shared<Linear>(attention.width, inner, attention.qkv_bias, options));
  k_proj = register_module("k_proj", std::make_shared<Linear>(attention.width, kv_inner, attention.qkv_bias, options));
  v_proj = register_module("v_proj", std::make_shared<Linear>(attention.width, kv_inner, attention.qkv_bias, options));
  o_proj = register_module("o_proj", std::make_shared<Linear>(inner, attention.width, attention.output_bias, options));
}

at::Tensor Attention::forward(const at::Tensor& x, const AttentionContext& context) {
  const auto heads = [&x](const at::Tensor& projected, int64_t count, int64_t dim) {
    return projected.view({x.size(0), x.size(1), count, dim});
  };
  const auto& a = attention_;
  const auto q = rotary(heads((*q_proj)(x), a.heads, a.head_dim), context.cos, context.sin).transpose(1, 2);
  auto k = rotary(heads((*k_proj)(x), a.kv_heads, a.head_dim), context.cos, context.sin).transpose(1, 2);
  auto v = heads((*v_proj)(x), a.kv_heads, a.head_dim).transpose(1, 2);
  if (context.cache) std::tie(k, v) = context.cache->append(a.layer, k, v);
  const bool causal = !context.mask.defined() && context.causal && x.size(1) > 1;
  const auto mask = context.mask.defined() ? std::optional<at::Tensor>(context.mask) : std::nullopt;
  const auto y = at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, causal, /*scale=*/std::nullopt,
                                                  /*enable_gqa=*/a.heads != a.kv_heads);
  return (*o_proj)(y.transpose(1, 2).reshape({x.size(0), x.size(1), a.heads * a.head_dim}));
}

}  // namespace tessera::nn
