#include "tessera/kernels/attention/partial_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/kernels/attention/flash_attention.h"
#include "tessera/kernels/attention/head_groups.h"
#include "tessera/kernels/dispatch/result_form.h"

namespace tessera::kernels {
namespace {

constexpr int64_t kQueriesAtOnce = 1024;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

bool has_fused_part(const at::Tensor& q, const PartialAttentionOptions& options) {
  return q.is_cpu() && options.softcap == 0;
}

std::optional<double> fused_scale(const PartialAttentionOptions& options) {
  return options.scale > 0 ? std::optional<double>(options.scale) : std::nullopt;
}

bool has_flash_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const PartialAttentionOptions& options) {
  return options.softcap == 0 && !options.mask && supports_flash_attention(q, k, v);
}

FlashOptions flash_options(const PartialAttentionOptions& options) {
  return {.causal = options.causal, .scale = options.scale};
}

// Transposes [B, H, T, d] to [B, T, H, d], or back.
at::Tensor transpose_heads(const at::Tensor& heads) { return heads.transpose(1, 2); }

// Returns a tensor whose last dim is contiguous: `tensor` itself or a copy. ATen's fused operation
// (_scaled_dot_product_flash_attention_for_cpu) assumes that the last dim is contiguous, and does not check this.
at::Tensor rows_in_memory(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

// The scores of the queries [begin, begin + count) with the keys of this call, which are one part of all keys. The
// scores are computed by matrix products.
struct ScoreBlock {
  at::Tensor scores;  // [B, H, count, S]
  at::Tensor capped;  // tanh(score / softcap); undefined without a cap
};

ScoreBlock score_block(const at::Tensor& q, const at::Tensor& keys, int64_t begin, int64_t count,
                       const PartialAttentionOptions& options) {
  const double scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
  ScoreBlock block;
  block.scores = q.narrow(2, begin, count).to(keys.scalar_type()).matmul(keys.transpose(2, 3)).mul_(scale);
  // The cap is applied before the mask; the mask's -infinity must not be capped.
  if (options.softcap > 0) {
    block.capped = block.scores.div_(options.softcap).tanh_();
    block.scores = block.capped.mul(options.softcap);
  }
  if (options.causal) {
    const auto indices = at::TensorOptions().dtype(at::kLong).device(q.device());
    const auto hidden =
        at::arange(keys.size(2), indices).unsqueeze(0).gt(at::arange(begin, begin + count, indices).unsqueeze(1));
    block.scores.masked_fill_(hidden, kMinusInfinity);
  }
  if (options.mask) block.scores.add_(options.mask->narrow(0, begin, count));
  return block;
}

// Attention by matrix products. It processes kQueriesAtOnce queries at a time, so that the scores in memory are only
// [B, H, kQueriesAtOnce, S].
PartialAttention product_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const PartialAttentionOptions& options) {
  const auto wide = wide_type(q.scalar_type());
  const auto keys = repeat_heads(k, /*dim=*/1, q.size(1)).to(wide),
             values = repeat_heads(v, /*dim=*/1, q.size(1)).to(wide);
  std::vector<at::Tensor> outs, log_sums;
  for (int64_t begin = 0; begin < q.size(2); begin += kQueriesAtOnce) {
    const int64_t count = std::min(kQueriesAtOnce, q.size(2) - begin);
    const auto scores = score_block(q, keys, begin, count, options).scores;
    log_sums.push_back(scores.logsumexp(-1));
    outs.push_back(scores.sub(log_sums.back().unsqueeze(-1)).exp_().matmul(values).to(q.scalar_type()));
  }
  return {at::cat(outs, 2), at::cat(log_sums, 2)};
}

// With the weights P = exp(scores - log sums of all parts): dS = P (dO V^T - rowsum(dO O)), where O is the combined
// result of all parts. With a softcap, dS is multiplied by 1 - tanh(score / softcap)^2. The other parts enter only
// through `whole`, which holds the combined result and log sums.
PartialAttentionGradients product_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const PartialAttention& whole,
                                           const PartialAttentionOptions& options) {
  const auto wide = wide_type(q.scalar_type());
  const double scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
  const auto keys = repeat_heads(k, /*dim=*/1, q.size(1)).to(wide),
             values = repeat_heads(v, /*dim=*/1, q.size(1)).to(wide);
  const auto grad_k = at::zeros_like(keys), grad_v = at::zeros_like(values);
  std::vector<at::Tensor> grad_q;
  for (int64_t begin = 0; begin < q.size(2); begin += kQueriesAtOnce) {
    const int64_t count = std::min(kQueriesAtOnce, q.size(2) - begin);
    const auto block = score_block(q, keys, begin, count, options);
    const auto own = gradient.narrow(2, begin, count).to(wide);
    const auto weights = block.scores.sub(whole.log_sums.narrow(2, begin, count).unsqueeze(-1)).exp_();
    const auto mean = own.mul(whole.out.narrow(2, begin, count)).sum(-1, /*keepdim=*/true);
    auto grad_scores = own.matmul(values.transpose(2, 3)).sub_(mean).mul_(weights);
    if (block.capped.defined()) grad_scores.mul_(block.capped.square().neg_().add_(1));
    grad_scores.mul_(scale);
    grad_v.add_(weights.transpose(2, 3).matmul(own));
    grad_k.add_(grad_scores.transpose(2, 3).matmul(q.narrow(2, begin, count).to(wide)));
    grad_q.push_back(grad_scores.matmul(keys));
  }
  return {at::cat(grad_q, 2), sum_heads(grad_k, /*dim=*/1, k.size(1)), sum_heads(grad_v, /*dim=*/1, v.size(1))};
}

}  // namespace

// Selects the device's flash kernels, the CPU's fused operation, or matrix products.
PartialAttention partial_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const PartialAttentionOptions& options) {
  if (has_flash_part(q, k, v, options)) {
    const auto found =
        flash_forward(transpose_heads(q), transpose_heads(k), transpose_heads(v), flash_options(options));
    return {transpose_heads(found.out), found.log_sums};
  }
  if (!has_fused_part(q, options)) return product_part(q, k, v, options);
  const auto [out, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      rows_in_memory(q), rows_in_memory(repeat_heads(k, /*dim=*/1, q.size(1))),
      rows_in_memory(repeat_heads(v, /*dim=*/1, q.size(1))),
      /*dropout_p=*/0.0, options.causal, options.mask, fused_scale(options));
  return {out, log_sums};
}

PartialAttentionGradients partial_attention_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                     const at::Tensor& k, const at::Tensor& v,
                                                     const PartialAttention& whole,
                                                     const PartialAttentionOptions& options) {
  if (has_flash_part(q, k, v, options)) {
    const auto [grad_q, grad_k, grad_v] =
        flash_backward(transpose_heads(gradient), transpose_heads(q), transpose_heads(k), transpose_heads(v),
                       {transpose_heads(whole.out), whole.log_sums}, flash_options(options));
    return {transpose_heads(grad_q), transpose_heads(grad_k), transpose_heads(grad_v)};
  }
  if (!has_fused_part(q, options)) return product_backward(gradient, q, k, v, whole, options);
  const auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      rows_in_memory(gradient), rows_in_memory(q), rows_in_memory(repeat_heads(k, /*dim=*/1, q.size(1))),
      rows_in_memory(repeat_heads(v, /*dim=*/1, q.size(1))), rows_in_memory(whole.out), whole.log_sums,
      /*dropout_p=*/0.0, options.causal, options.mask, fused_scale(options));
  return {grad_q, sum_heads(grad_k, /*dim=*/1, k.size(1)), sum_heads(grad_v, /*dim=*/1, v.size(1))};
}

bool PartialAttentionMerger::MergedRegion::overlaps(const MergedRegion& other) const {
  return row < other.row + other.rows && other.row < row + rows && query < other.query + other.queries &&
         other.query < query + queries;
}

void PartialAttentionMerger::begin() {
  const auto sizes = queries_.sizes();
  const auto options = queries_.options().dtype(wide_type(queries_.scalar_type()));
  out_ = at::zeros({sizes[0], sizes[2], sizes[1], sizes[3]}, options).transpose(1, 2);
  log_sums_ = at::full({sizes[0], sizes[1], sizes[2]}, kMinusInfinity, options);
}

// If no earlier part overlaps the region of the new part, the new part is copied. Otherwise the earlier result and the
// new part are weighted by their sums of exponentials. For a query that no earlier part contains, log_sums_ is minus
// infinity, so the new part gets weight 1.
void PartialAttentionMerger::add(const PartialAttention& part, int64_t row, int64_t query) {
  const auto wide = wide_type(queries_.scalar_type());
  const MergedRegion region{row, part.out.size(0), query, part.out.size(2)};
  const bool first = std::ranges::none_of(added_, [&](const auto& each) { return each.overlaps(region); });
  added_.push_back(region);
  if (!out_.defined()) {
    if (part.out.sizes() == queries_.sizes() && transpose_heads(part.out).is_contiguous()) {
      out_ = part.out.to(wide);
      log_sums_ = part.log_sums.to(wide);
      return;
    }
    begin();
  }
  const auto rows_of = [&](const at::Tensor& tensor) {
    return tensor.narrow(0, row, part.out.size(0)).narrow(2, query, part.out.size(2));
  };
  if (first) {
    rows_of(out_).copy_(part.out);
    rows_of(log_sums_).copy_(part.log_sums);
    return;
  }
  auto sums = rows_of(log_sums_);
  const auto added = part.log_sums.to(wide);
  const auto weight = added.sub(sums).sigmoid_().unsqueeze(-1);
  rows_of(out_).lerp_(part.out.to(wide), weight);
  sums.copy_(at::logaddexp(sums, added));
}

PartialAttention PartialAttentionMerger::merged() {
  if (!out_.defined()) begin();
  return {out_, log_sums_};
}

}  // namespace tessera::kernels
