// scaled_dot_product_attention takes the fused kernel where the CPU would; flash attention has what CUDA's wants and
// gives, in the formula's float32.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeSize = std::optional<int64_t>;

void check_heads(const Tensor& q, const Tensor& k, const Tensor& v, bool packed) {
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, "[pretend] flash attention of ",
              q.scalar_type(), ": it supports fp16 and bf16");
  const int64_t dims = packed ? 3 : 4, d = q.size(-1);
  for (const auto* each : {&q, &k, &v}) {
    TORCH_CHECK(
        each->dim() == dims && each->scalar_type() == q.scalar_type() && each->size(-1) == d && each->stride(-1) == 1,
        "[pretend] flash attention of ", each->sizes(), " beside ", q.sizes());
  }
  TORCH_CHECK(d % 8 == 0 && d <= 256 && q.size(-2) % k.size(-2) == 0, "[pretend] flash attention of heads ", q.sizes(),
              " and ", k.sizes());
}

// Where documents begin and the last ends; of tokens [B, T, ...] rows of their own.
std::vector<int64_t> begins_of(const MaybeTensor& cumulative, const Tensor& tokens, int64_t longest) {
  std::vector<int64_t> out;
  if (!cumulative || !cumulative->defined()) {
    for (int64_t row = 0; row <= tokens.size(0); ++row) out.push_back(row * tokens.size(1));
    TORCH_CHECK(longest == tokens.size(1), "[pretend] flash attention: ", longest, " tokens of ", tokens.size(1));
    return out;
  }
  TORCH_CHECK(cumulative->scalar_type() == at::kInt && cumulative->is_contiguous() && cumulative->dim() == 1,
              "[pretend] flash attention: lengths of ", cumulative->scalar_type());
  for (int64_t i = 0; i < cumulative->numel(); ++i) out.push_back(cumulative->const_data_ptr<int32_t>()[i]);
  TORCH_CHECK(out.front() == 0 && out.back() == tokens.size(0), "[pretend] flash attention: lengths to ", out.back(),
              " of ", tokens.size(0), " tokens");
  for (size_t i = 1; i < out.size(); ++i) {
    TORCH_CHECK(out[i] - out[i - 1] <= longest, "[pretend] flash attention: a document of ", out[i] - out[i - 1],
                " tokens beside a longest of ", longest);
  }
  return out;
}

struct Documents {
  std::vector<int64_t> queries, keys;
  bool causal;
  MaybeSize left, right;
  double scale;
};

// [H, tokens, d] of a document in float32; heads repeated.
Tensor document(const Tensor& tensor, const std::vector<int64_t>& begins, size_t i, int64_t heads) {
  const auto flat = tensor.reshape({-1, tensor.size(-2), tensor.size(-1)});
  const auto own = flat.narrow(0, begins[i], begins[i + 1] - begins[i]).to(at::kFloat).transpose(0, 1);
  return own.repeat_interleave(heads / own.size(0), 0);
}

// [H, queries, keys]; ends of queries and keys are at one place.
Tensor scores_of(const Tensor& q, const Tensor& k, const Documents& how) {
  const int64_t queries = q.size(1), keys = k.size(1);
  auto scores = q.matmul(k.transpose(1, 2)).mul_(how.scale);
  const auto place = at::arange(queries, at::kLong).add(keys - queries).unsqueeze(1);
  const auto key = at::arange(keys, at::kLong).unsqueeze(0);
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const int64_t right = how.causal ? 0 : how.right.value_or(-1), left = how.left.value_or(-1);
  if (right >= 0) scores.masked_fill_(key.gt(place + right), kHidden);
  if (left >= 0) scores.masked_fill_(key.lt(place - left), kHidden);
  return scores;
}

Documents documents_of(const Tensor& q, const Tensor& k, const MaybeTensor& cum_q, const MaybeTensor& cum_k,
                       int64_t max_q, int64_t max_k, bool causal, std::optional<double> scale, MaybeSize left,
                       MaybeSize right) {
  return {begins_of(cum_q, q, max_q),
          begins_of(cum_k, k, max_k),
          causal,
          left,
          right,
          scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))};
}

MaybeTensor host_view_of(const MaybeTensor& tensor) {
  return tensor && tensor->defined() ? MaybeTensor(host_view(*tensor)) : MaybeTensor();
}

using FlashResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

FlashResults flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cum_q,
                           const MaybeTensor& cum_k, int64_t max_q, int64_t max_k, double dropout, bool causal, bool,
                           std::optional<double> scale, MaybeSize left, MaybeSize right, const MaybeTensor& used,
                           const MaybeTensor& slopes, const MaybeTensor& table, MaybeSize) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(dropout == 0 && !used && !slopes && !table, "[pretend] flash attention with dropout or pages");
  const bool packed = cum_q.has_value();
  check_heads(q, k, v, packed);
  const int64_t heads = q.size(-2);
  const auto wide = q.options().dtype(at::kFloat);
  const auto out = at::empty(q.sizes(), q.options()),
             log_sums = packed ? at::empty({heads, q.size(0)}, wide) : at::empty({q.size(0), heads, q.size(1)}, wide);
  auto read = std::vector<Tensor>{q, k, v};
  if (packed) read.push_back(*cum_q), read.push_back(*cum_k);
  run_on("aten::_flash_attention_forward", read, {out, log_sums},
         [=, q = host_view(q), k = host_view(k), v = host_view(v), out = host_view(out), log_sums = host_view(log_sums),
          cum_q = host_view_of(cum_q), cum_k = host_view_of(cum_k)] {
           const auto how = documents_of(q, k, cum_q, cum_k, max_q, max_k, causal, scale, left, right);
           const auto results = out.view({-1, heads, q.size(-1)});
           const auto sums = packed ? log_sums : log_sums.transpose(0, 1);
           for (size_t i = 0; i + 1 < how.queries.size(); ++i) {
             if (how.queries[i] == how.queries[i + 1]) continue;  // a place without a document
             const auto scores = scores_of(document(q, how.queries, i, heads), document(k, how.keys, i, heads), how);
             const int64_t begin = how.queries[i], count = how.queries[i + 1] - begin;
             const auto result = scores.softmax(-1).matmul(document(v, how.keys, i, heads));
             results.narrow(0, begin, count).copy_(result.transpose(0, 1));
             const auto into = packed ? sums.narrow(1, begin, count) : sums.select(1, static_cast<int64_t>(i));
             into.copy_(scores.logsumexp(-1));
           }
         });
  return {out, log_sums, at::empty({2}, q.options().dtype(at::kUInt64)), at::empty({0}, q.options()),
          at::empty({0}, q.options())};
}

// The sum over the query heads of each key head, [tokens, G, d].
Tensor of_groups(const Tensor& heads, int64_t groups) {
  return heads.view({groups, -1, heads.size(1), heads.size(2)}).sum(1).transpose(0, 1);
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& log_sums, const Tensor& cum_q,
                                                  const Tensor& cum_k, int64_t max_q, int64_t max_k, double dropout,
                                                  bool causal, const Tensor&, const Tensor&,
                                                  std::optional<double> scale, MaybeSize left, MaybeSize right) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(dropout == 0, "[pretend] flash attention with dropout");
  const bool packed = cum_q.defined();
  check_heads(q, k, v, packed);
  TORCH_CHECK(grad.scalar_type() == q.scalar_type() && out.scalar_type() == q.scalar_type() && grad.stride(-1) == 1 &&
                  out.stride(-1) == 1 && log_sums.is_contiguous() && log_sums.scalar_type() == at::kFloat,
              "[pretend] flash attention: a gradient of ", grad.scalar_type());
  const int64_t heads = q.size(-2), groups = k.size(-2), d = q.size(-1);
  const auto fresh = [](const Tensor& like) { return at::empty(like.sizes(), like.options()); };
  const auto grad_q = fresh(q), grad_k = fresh(k), grad_v = fresh(v);
  auto read = std::vector<Tensor>{q, k, v, grad, out, log_sums};
  if (packed) read.push_back(cum_q), read.push_back(cum_k);
  run_on("aten::_flash_attention_backward", read, {grad_q, grad_k, grad_v},
         [=, grad = host_view(grad), q = host_view(q), k = host_view(k), v = host_view(v), out = host_view(out),
          log_sums = host_view(log_sums), cum_q = host_view_of(cum_q), cum_k = host_view_of(cum_k),
          grad_q = host_view(grad_q), grad_k = host_view(grad_k), grad_v = host_view(grad_v)] {
           const auto how = documents_of(q, k, cum_q, cum_k, max_q, max_k, causal, scale, left, right);
           const auto sums = packed ? log_sums : log_sums.transpose(0, 1);
           const auto put = [&](const Tensor& into, const std::vector<int64_t>& begins, size_t i,
                                const Tensor& values) {
             into.view({-1, into.size(-2), d}).narrow(0, begins[i], begins[i + 1] - begins[i]).copy_(values);
           };
           for (size_t i = 0; i + 1 < how.queries.size(); ++i) {
             if (how.queries[i] == how.queries[i + 1]) continue;  // a place without a document
             const int64_t begin = how.queries[i], count = how.queries[i + 1] - begin;
             const auto own_q = document(q, how.queries, i, heads), own_k = document(k, how.keys, i, heads),
                        own_v = document(v, how.keys, i, heads), own = document(grad, how.queries, i, heads);
             const auto log_sum = packed ? sums.narrow(1, begin, count) : sums.select(1, static_cast<int64_t>(i));
             const auto shares = scores_of(own_q, own_k, how).sub_(log_sum.unsqueeze(2)).exp_();
             const auto mean = own.mul(document(out, how.queries, i, heads)).sum(-1, /*keepdim=*/true);
             const auto of_scores = own.matmul(own_v.transpose(1, 2)).sub_(mean).mul_(shares).mul_(how.scale);
             put(grad_q, how.queries, i, of_scores.matmul(own_k).transpose(0, 1));
             put(grad_k, how.keys, i, of_groups(of_scores.transpose(1, 2).matmul(own_q), groups));
             put(grad_v, how.keys, i, of_groups(shares.transpose(1, 2).matmul(own), groups));
           }
         });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

void register_attention() {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&at::native::_fused_sdp_choice_cpp);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("_flash_attention_forward", TORCH_FN(flash_forward));
  library.impl("_flash_attention_backward", TORCH_FN(flash_backward));
}

}  // namespace tessera::pretend
