// Attention of the pretend device. scaled_dot_product_attention chooses the fused kernel where the CPU does. Flash and
// memory-efficient attention have the same requirements and results as CUDA's kernels, and compute the formula in
// float32.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <torch/library.h>

#include <cmath>
#include <functional>
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

// Start of each document, and the end of the last one. Without `cumulative`, tokens [B, T, ...] have one document per
// row.
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

// Tokens [H, tokens, d] of a document in float32; heads are repeated.
Tensor document(const Tensor& tensor, const std::vector<int64_t>& begins, size_t i, int64_t heads) {
  const auto flat = tensor.reshape({-1, tensor.size(-2), tensor.size(-1)});
  const auto own = flat.narrow(0, begins[i], begins[i + 1] - begins[i]).to(at::kFloat).transpose(0, 1);
  return own.repeat_interleave(heads / own.size(0), 0);
}

// Scores [H, queries, keys]. The last query and the last key have the same position.
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
             if (how.queries[i] == how.queries[i + 1]) continue;  // an empty document
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

struct OfAttention {
  Tensor q, k, v, grad, out;
};
struct GradientsInto {
  Tensor q, k, v;
};

// log_sums_of(document, its number of queries) gives [H, queries].
void add_document_gradients(const OfAttention& of, const GradientsInto& into, const Documents& how, int64_t heads,
                            const std::function<Tensor(size_t, int64_t)>& log_sums_of) {
  const int64_t groups = of.k.size(-2), d = of.q.size(-1);
  const auto put = [&](const Tensor& all, const std::vector<int64_t>& begins, size_t i, const Tensor& values) {
    all.view({-1, all.size(-2), d}).narrow(0, begins[i], begins[i + 1] - begins[i]).copy_(values);
  };
  for (size_t i = 0; i + 1 < how.queries.size(); ++i) {
    if (how.queries[i] == how.queries[i + 1]) continue;  // an empty document
    const auto q = document(of.q, how.queries, i, heads), k = document(of.k, how.keys, i, heads),
               v = document(of.v, how.keys, i, heads), grad = document(of.grad, how.queries, i, heads);
    const auto log_sum = log_sums_of(i, how.queries[i + 1] - how.queries[i]);
    const auto shares = scores_of(q, k, how).sub_(log_sum.unsqueeze(2)).exp_();
    const auto mean = grad.mul(document(of.out, how.queries, i, heads)).sum(-1, /*keepdim=*/true);
    const auto of_scores = grad.matmul(v.transpose(1, 2)).sub_(mean).mul_(shares).mul_(how.scale);
    put(into.q, how.queries, i, of_scores.matmul(k).transpose(0, 1));
    put(into.k, how.keys, i, of_groups(of_scores.transpose(1, 2).matmul(q), groups));
    put(into.v, how.keys, i, of_groups(shares.transpose(1, 2).matmul(grad), groups));
  }
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
  const int64_t heads = q.size(-2);
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
           add_document_gradients(
               {q, k, v, grad, out}, {grad_q, grad_k, grad_v}, how, heads, [&](size_t i, int64_t count) {
                 return packed ? sums.narrow(1, how.queries[i], count) : sums.select(1, static_cast<int64_t>(i));
               });
         });
  return {grad_q, grad_k, grad_v};
}

// ---- memory-efficient attention ----

using MaybeScale = std::optional<double>;

constexpr int64_t kSumsTogether = 32;  // CUDA's kernels store log sums for multiples of this many queries

struct EfficientArguments {
  MaybeTensor begins_q, begins_k;
  MaybeSize longest_q, longest_k, window;
  int64_t mask;
  MaybeScale scale;
};

void check_efficient(const Tensor& q, const Tensor& k, const Tensor& v, const EfficientArguments& of) {
  for (const auto* each : {&q, &k, &v}) {
    TORCH_CHECK(each->dim() == 4 && each->scalar_type() == at::kFloat && each->size(0) == q.size(0) &&
                    each->size(2) == q.size(2) && each->size(3) == q.size(3) && each->stride(3) == 1,
                "[pretend] efficient attention of ", each->sizes(), " ", each->scalar_type(), " beside ", q.sizes());
    TORCH_CHECK(each->stride(2) % 4 == 0 && reinterpret_cast<uintptr_t>(each->const_data_ptr()) % 16 == 0,
                "[pretend] efficient attention: a vector of a head lies across two");
  }
  TORCH_CHECK(k.size(1) == v.size(1), "[pretend] efficient attention: keys ", k.sizes(), ", values ", v.sizes());
  TORCH_CHECK(of.mask == 0 || of.mask == 1, "[pretend] efficient attention with a mask of kind ", of.mask);
  TORCH_CHECK(!of.window || of.mask == 1, "[pretend] efficient attention: a window without a causal mask");
  TORCH_CHECK(of.begins_q.has_value() == of.begins_k.has_value(), "[pretend] efficient attention: lengths of one");
  if (of.begins_q) {
    TORCH_CHECK(q.size(0) == 1 && of.longest_q && *of.longest_q > 0 && of.longest_k && *of.longest_k > 0,
                "[pretend] efficient attention: lengths of ", q.size(0), " rows");
  }
}

// One row or document after another. Each one is causal from its first query and key on.
Documents efficient_documents(const Tensor& q, const Tensor& k, const EfficientArguments& of) {
  auto out = documents_of(of.begins_q ? q[0] : q, of.begins_k ? k[0] : k, of.begins_q, of.begins_k,
                          of.longest_q.value_or(q.size(1)), of.longest_k.value_or(k.size(1)), of.mask == 1, of.scale,
                          of.window ? MaybeSize(*of.window - 1) : MaybeSize(), {});
  for (size_t i = 0; i < out.queries.size() && out.causal; ++i) {
    TORCH_CHECK(out.queries[i] == out.keys[i], "[pretend] efficient attention: causal with other keys than queries");
  }
  return out;
}

using EfficientResults = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt>;

EfficientResults efficient_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias,
                                   const MaybeTensor& begins_q, const MaybeTensor& begins_k,
                                   std::optional<c10::SymInt> longest_q, std::optional<c10::SymInt> longest_k,
                                   double dropout, int64_t mask, bool with_sums, MaybeScale scale,
                                   const MaybeTensor& lengths_k, MaybeSize window) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(dropout == 0 && !bias && !lengths_k && with_sums, "[pretend] efficient attention with bias or dropout");
  const auto size = [](const std::optional<c10::SymInt>& of) {
    return of ? MaybeSize(of->guard_int(__FILE__, __LINE__)) : MaybeSize();
  };
  EfficientArguments of{begins_q, begins_k, size(longest_q), size(longest_k), window, mask, scale};
  check_efficient(q, k, v, of);
  const int64_t heads = q.size(2), queries = of.begins_q ? *of.longest_q : q.size(1),
                rows = of.begins_q ? of.begins_q->numel() - 1 : q.size(0);
  const auto out = at::empty(q.sizes(), q.options());
  const auto log_sums =
      at::empty({rows, heads, (queries + kSumsTogether - 1) / kSumsTogether * kSumsTogether}, q.options());
  auto read = std::vector<Tensor>{q, k, v};
  if (begins_q) read.push_back(*begins_q), read.push_back(*begins_k);
  of.begins_q = host_view_of(begins_q), of.begins_k = host_view_of(begins_k);
  run_on(
      "aten::_efficient_attention_forward", read, {out, log_sums},
      [=, q = host_view(q), k = host_view(k), v = host_view(v), out = host_view(out), log_sums = host_view(log_sums)] {
        const auto how = efficient_documents(q, k, of);
        const auto results = out.view({-1, heads, q.size(3)});
        log_sums.fill_(std::numeric_limits<double>::infinity());
        for (size_t i = 0; i + 1 < how.queries.size(); ++i) {
          const int64_t begin = how.queries[i], count = how.queries[i + 1] - begin;
          if (count == 0) continue;
          const auto scores = scores_of(document(q, how.queries, i, heads), document(k, how.keys, i, heads), how);
          const auto result = scores.softmax(-1).matmul(document(v, how.keys, i, heads));
          results.narrow(0, begin, count).copy_(result.transpose(0, 1));
          log_sums[static_cast<int64_t>(i)].narrow(1, 0, count).copy_(scores.logsumexp(-1));
        }
      });
  const auto seed = at::empty({}, q.options().dtype(at::kLong));
  return {out, log_sums, seed, seed, queries, of.longest_k.value_or(k.size(1))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias, const Tensor& out,
    const MaybeTensor& begins_q, const MaybeTensor& begins_k, c10::SymInt longest_q, c10::SymInt longest_k,
    const Tensor& log_sums, double dropout, const Tensor&, const Tensor&, int64_t mask, bool of_bias, MaybeScale scale,
    MaybeSize splits, MaybeSize window, bool shared) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(dropout == 0 && !bias && !of_bias && !splits && !shared, "[pretend] efficient attention with bias");
  EfficientArguments of{
      begins_q, begins_k, longest_q.guard_int(__FILE__, __LINE__), longest_k.guard_int(__FILE__, __LINE__), window,
      mask,     scale};
  check_efficient(q, k, v, of);
  // The kernel assumes that the result is contiguous.
  TORCH_CHECK(grad.is_contiguous() && out.is_contiguous() && out.sizes() == q.sizes() && grad.sizes() == q.sizes() &&
                  log_sums.is_contiguous() && log_sums.size(2) % kSumsTogether == 0 &&
                  log_sums.size(2) >= *of.longest_q,
              "[pretend] efficient attention: log sums ", log_sums.sizes(), " of ", q.sizes());
  if (begins_q) {
    TORCH_CHECK(*of.longest_q <= q.size(1) && *of.longest_k <= k.size(1),
                "[pretend] efficient attention: a longest document of ", *of.longest_q, " among ", q.size(1),
                " tokens");
  }
  const int64_t heads = q.size(2);
  const auto fresh = [](const Tensor& like) { return at::empty(like.sizes(), like.options()); };
  const auto grad_q = fresh(q), grad_k = fresh(k), grad_v = fresh(v);
  auto read = std::vector<Tensor>{q, k, v, grad, out, log_sums};
  if (begins_q) read.push_back(*begins_q), read.push_back(*begins_k);
  of.begins_q = host_view_of(begins_q), of.begins_k = host_view_of(begins_k);
  run_on("aten::_efficient_attention_backward", read, {grad_q, grad_k, grad_v},
         [=, grad = host_view(grad), q = host_view(q), k = host_view(k), v = host_view(v), out = host_view(out),
          log_sums = host_view(log_sums), grad_q = host_view(grad_q), grad_k = host_view(grad_k),
          grad_v = host_view(grad_v)] {
           const auto how = efficient_documents(q, k, of);
           add_document_gradients(
               {q, k, v, grad, out}, {grad_q, grad_k, grad_v}, how, heads,
               [&](size_t i, int64_t count) { return log_sums[static_cast<int64_t>(i)].narrow(1, 0, count); });
         });
  return {grad_q, grad_k, grad_v, Tensor()};
}

}  // namespace

void register_attention() {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&at::native::_fused_sdp_choice_cpp);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("_flash_attention_forward", TORCH_FN(flash_forward));
  library.impl("_flash_attention_backward", TORCH_FN(flash_backward));
  library.impl("_efficient_attention_forward", TORCH_FN(efficient_forward));
  library.impl("_efficient_attention_backward", TORCH_FN(efficient_backward));
}

}  // namespace tessera::pretend
