#include "tessera/kernels/detail/attention_loops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/kernels/detail/lane_products.h"
#include "tessera/kernels/detail/lanes.h"

namespace tessera::detail {

bool has_attention_loops() { return has_lanes(); }

#ifdef TESSERA_HAS_LANES
namespace {

// Tokens of a row that see one another and no others.
struct Span {
  int64_t row, begin, tokens;
};

// Where no later token looks back, a span begins; padding is one.
std::vector<Span> spans_of(const at::Tensor& first_key, int64_t rows, int64_t tokens) {
  std::vector<Span> spans;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* first = first_key.defined() ? first_key.const_data_ptr<int64_t>() + row * tokens : nullptr;
    int64_t end = tokens, least = tokens;
    for (int64_t t = tokens - 1; t >= 0; --t) {
      least = std::min(least, std::min(t, first != nullptr ? first[t] : 0));
      const bool in_padding = t > 0 && first != nullptr && first[t] > t && first[t - 1] >= t;
      if (least < t || in_padding) continue;
      spans.push_back({row, t, end - t});
      end = t;
    }
  }
  return spans;
}

struct FreeFloats {
  void operator()(float* data) const { ::operator delete[](data, std::align_val_t(64)); }
};

// Memory of one unit of work, handed out piece by piece.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(static_cast<float*>(::operator new[](static_cast<size_t>(floats) * sizeof(float), std::align_val_t(64)))),
        next_(data_.get()) {}
  float* take(int64_t floats) { return std::exchange(next_, next_ + floats); }

 private:
  std::unique_ptr<float, FreeFloats> data_;
  float* next_;
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of what GCC 12's own headers leave undefined
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

// Keys of one block that a query sees: [low, high) counted from the block's first.
struct Visible {
  int64_t low, high;
  bool all() const { return low <= 0 && high >= kBlock; }
  __mmask16 lanes(int64_t at) const {
    const auto from = first_lanes(std::clamp<int64_t>(low - at, 0, kLanes));
    return static_cast<__mmask16>(first_lanes(std::clamp<int64_t>(high - at, 0, kLanes)) & ~from);
  }
};

// Scores of a block's row become exponentials; the running maximum, sum and result follow.
inline void soften(float* scores, const Visible& visible, float scale, float& most, float& sum, float* result,
                   int64_t width) {
  const Lanes least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  Lanes values[kBlock / kLanes], peak = _mm512_set1_ps(most);
  __mmask16 not_numbers = 0;
  for (int64_t n = 0; n < kBlock / kLanes; ++n) {
    values[n] =
        _mm512_mask_mul_ps(least, visible.lanes(n * kLanes), load_lanes(scores + n * kLanes), _mm512_set1_ps(scale));
    not_numbers |= _mm512_cmp_ps_mask(values[n], values[n], _CMP_UNORD_Q);
    peak = _mm512_max_ps(peak, values[n]);  // of a NaN in one operand the second
  }
  const float now = largest_of(peak);
  if (now == -std::numeric_limits<float>::infinity() && not_numbers == 0) {
    for (int64_t n = 0; n < kBlock / kLanes; ++n) store_lanes(scores + n * kLanes, _mm512_setzero_ps());
    return;
  }
  Lanes total = _mm512_setzero_ps();
  for (int64_t n = 0; n < kBlock / kLanes; ++n) {
    const Lanes power = exp_lanes(_mm512_sub_ps(values[n], _mm512_set1_ps(now)));
    store_lanes(scores + n * kLanes, power);
    total = _mm512_add_ps(total, power);
  }
  if (now > most) {
    const float shrink = most == -std::numeric_limits<float>::infinity() ? 0.0F : std::exp(most - now);
    sum *= shrink;
    for (int64_t i = 0; i < width; i += kLanes) {
      store_lanes(result + i, _mm512_mul_ps(load_lanes(result + i), _mm512_set1_ps(shrink)));
    }
    most = now;
  }
  sum += sum_of(total);
}

// What the units of one call share.
struct Plan {
  std::vector<Span> spans;
  int64_t tokens, heads, groups, width;
  const int64_t* first_key;  // null: 0
  float scale;

  int64_t heads_of_group() const { return heads / groups; }
  int64_t first_of(const Span& span, int64_t t) const {  // counted from the span
    return first_key == nullptr ? 0 : first_key[span.row * tokens + span.begin + t] - span.begin;
  }
  bool is_padding(const Span& span) const {  // none of its tokens sees any
    for (int64_t t = 0; t < span.tokens; ++t) {
      if (first_of(span, t) <= t) return false;
    }
    return true;
  }
  // The first block of keys that some query of [begin, begin + count) sees.
  int64_t first_block(const Span& span, int64_t begin, int64_t count) const {
    int64_t first = begin;
    for (int64_t t = begin; t < begin + count; ++t) first = std::min(first, first_of(span, t));
    return first / kBlock;
  }
};

template <class T>
struct Heads {  // [B, heads, T, d], d contiguous
  T* data;
  int64_t row, head, token;
  T* at(const Span& span, int64_t h) const { return data + span.row * row + h * head + span.begin * token; }
};

template <class T>
Heads<T> heads_of(const at::Tensor& tensor) {
  using Plain = std::remove_const_t<T>;
  T* data;
  if constexpr (std::is_const_v<T>) {
    data = tensor.const_data_ptr<Plain>();
  } else {
    data = tensor.mutable_data_ptr<Plain>();
  }
  return {data, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

template <class T>
void zero_tokens(const Heads<T>& heads, const Span& span, int64_t head, int64_t width) {
  for (int64_t t = 0; t < span.tokens; ++t) std::fill_n(heads.at(span, head) + t * heads.token, width, T(0.0F));
}

template <class T>
void forward_unit(const Plan& plan, const Span& span, int64_t group, const Heads<const T>& q, const Heads<const T>& k,
                  const Heads<const T>& v, const Heads<T>& result, float* log_sums) {
  const int64_t n = span.tokens, d = plan.width;
  if (plan.is_padding(span)) {
    for (int64_t head = group * plan.heads_of_group(); head < (group + 1) * plan.heads_of_group(); ++head) {
      zero_tokens(result, span, head, d);
      std::fill_n(log_sums + (span.row * plan.heads + head) * plan.tokens + span.begin, n, 0.0F);
    }
    return;
  }
  Scratch scratch(padded(n) * d + 2 * n * d + 2 * kBlock * d + kBlock * kBlock);
  float* const keys = scratch.take(padded(n) * d);
  float* const values = scratch.take(n * d);
  float* const plain = scratch.take(n * d);
  float* const queries = scratch.take(kBlock * d);
  float* const sums = scratch.take(kBlock * d);
  float* const scores = scratch.take(kBlock * kBlock);
  gather(k.at(span, group), k.token, n, d, plain);
  transpose_blocks(plain, n, d, keys);
  gather(v.at(span, group), v.token, n, d, values);
  for (int64_t head = group * plan.heads_of_group(); head < (group + 1) * plan.heads_of_group(); ++head) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      float most[kBlock], total[kBlock];
      std::fill_n(most, kBlock, -std::numeric_limits<float>::infinity());
      std::fill_n(total, kBlock, 0.0F);
      std::fill_n(sums, kBlock * d, 0.0F);
      gather(q.at(span, head) + begin * q.token, q.token, count, d, queries);
      for (int64_t block = plan.first_block(span, begin, count); block * kBlock <= begin; ++block) {
        const int64_t seen = std::min(kBlock, n - block * kBlock);
        multiply(count, kBlock, d, {queries, d, 1}, {keys + block * kBlock * d, kBlock}, scores, kBlock, false);
        for (int64_t r = 0; r < count; ++r) {
          const Visible visible{plan.first_of(span, begin + r) - block * kBlock, begin + r + 1 - block * kBlock};
          soften(scores + r * kBlock, visible, plan.scale, most[r], total[r], sums + r * d, d);
        }
        multiply(count, d, seen, {scores, kBlock, 1}, {values + block * kBlock * d, d}, sums, d, true);
      }
      for (int64_t r = 0; r < count; ++r) {
        const Lanes share = _mm512_set1_ps(total[r] == 0 ? 0.0F : 1 / total[r]);
        for (int64_t i = 0; i < d; i += kLanes) {
          store_lanes(sums + r * d + i, _mm512_mul_ps(load_lanes(sums + r * d + i), share));
        }
        log_sums[(span.row * plan.heads + head) * plan.tokens + span.begin + begin + r] =
            total[r] == 0 ? 0.0F : most[r] + std::log(total[r]);
      }
      scatter(sums, result.token, count, d, result.at(span, head) + begin * result.token);
    }
  }
}

// Scores of a block's row become shares. Returns the sum of shares times pulls.
inline float share_row(float* scores, const float* pulls, const Visible& visible, float scale, float log_sum) {
  Lanes sum = _mm512_setzero_ps();
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    const auto lanes = visible.lanes(at);
    const Lanes shifted = _mm512_fmsub_ps(load_lanes(scores + at), _mm512_set1_ps(scale), _mm512_set1_ps(log_sum));
    const Lanes share = _mm512_maskz_mov_ps(lanes, exp_lanes(shifted));
    store_lanes(scores + at, share);
    sum = _mm512_mask3_fmadd_ps(share, load_lanes(pulls + at), sum, lanes);
  }
  return sum_of(sum);
}

// Pulls of a block's row (the gradient times the values) become the gradient of its scores.
inline void differentiate_row(const float* shares, float* pulls, const Visible& visible, float scale, float mean) {
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    const Lanes off = _mm512_mul_ps(_mm512_sub_ps(load_lanes(pulls + at), _mm512_set1_ps(mean)), _mm512_set1_ps(scale));
    store_lanes(pulls + at, _mm512_maskz_mul_ps(visible.lanes(at), load_lanes(shares + at), off));
  }
}

template <class T>
struct Backward {
  Heads<const T> q, k, v, grad;
  const float* log_sums;
  Heads<T> grad_q, grad_k, grad_v;
};

template <class T>
void backward_unit(const Plan& plan, const Span& span, int64_t group, const Backward<T>& call) {
  const int64_t n = span.tokens, d = plan.width, first_head = group * plan.heads_of_group();
  if (plan.is_padding(span)) {
    zero_tokens(call.grad_k, span, group, d);
    zero_tokens(call.grad_v, span, group, d);
    for (int64_t i = 0; i < plan.heads_of_group(); ++i) zero_tokens(call.grad_q, span, first_head + i, d);
    return;
  }
  Scratch scratch(2 * padded(n) * d + 6 * n * d + 2 * kBlock * padded(n));
  float* const keys_t = scratch.take(padded(n) * d);
  float* const values_t = scratch.take(padded(n) * d);
  float* const scores = scratch.take(kBlock * padded(n));  // of one block of queries, block by block of keys
  float* const pulls = scratch.take(kBlock * padded(n));
  float* const keys = scratch.take(n * d);
  float* const queries = scratch.take(n * d);
  float* const grads = scratch.take(n * d);
  float* const grad_q = scratch.take(n * d);  // before that, the values
  float* const grad_k = scratch.take(n * d);
  float* const grad_v = scratch.take(n * d);
  gather(call.v.at(span, group), call.v.token, n, d, grad_q);
  transpose_blocks(grad_q, n, d, values_t);
  gather(call.k.at(span, group), call.k.token, n, d, keys);
  transpose_blocks(keys, n, d, keys_t);
  std::fill_n(grad_k, n * d, 0.0F);
  std::fill_n(grad_v, n * d, 0.0F);
  for (int64_t head = first_head; head < first_head + plan.heads_of_group(); ++head) {
    const float* log_sums = call.log_sums + (span.row * plan.heads + head) * plan.tokens + span.begin;
    gather(call.q.at(span, head), call.q.token, n, d, queries);
    gather(call.grad.at(span, head), call.grad.token, n, d, grads);
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin), first = plan.first_block(span, begin, count);
      const Left own_queries{queries + begin * d, d, 1}, own_grads{grads + begin * d, d, 1};
      // The mean of the pulls, from the very shares: the result, rounded to 16 bits, would be off by what keys have in
      // common.
      float means[kBlock] = {};
      for (int64_t block = first; block * kBlock <= begin; ++block) {
        const int64_t at = block * kBlock;
        float *s = scores + at * kBlock, *p = pulls + at * kBlock;
        multiply(count, kBlock, d, own_queries, {keys_t + at * d, kBlock}, s, kBlock, false);
        multiply(count, kBlock, d, own_grads, {values_t + at * d, kBlock}, p, kBlock, false);
        for (int64_t r = 0; r < count; ++r) {
          const Visible visible{plan.first_of(span, begin + r) - at, begin + r + 1 - at};
          means[r] += share_row(s + r * kBlock, p + r * kBlock, visible, plan.scale, log_sums[begin + r]);
        }
      }
      for (int64_t block = first; block * kBlock <= begin; ++block) {
        const int64_t at = block * kBlock, seen = std::min(kBlock, n - at);
        float *s = scores + at * kBlock, *p = pulls + at * kBlock;
        for (int64_t r = 0; r < count; ++r) {
          const Visible visible{plan.first_of(span, begin + r) - at, begin + r + 1 - at};
          differentiate_row(s + r * kBlock, p + r * kBlock, visible, plan.scale, means[r]);
        }
        multiply(seen, d, count, {s, 1, kBlock}, {grads + begin * d, d}, grad_v + at * d, d, true);
        multiply(seen, d, count, {p, 1, kBlock}, {queries + begin * d, d}, grad_k + at * d, d, true);
        multiply(count, d, seen, {p, kBlock, 1}, {keys + at * d, d}, grad_q + begin * d, d, block > first);
      }
    }
    scatter(grad_q, call.grad_q.token, n, d, call.grad_q.at(span, head));
  }
  scatter(grad_k, call.grad_k.token, n, d, call.grad_k.at(span, group));
  scatter(grad_v, call.grad_v.token, n, d, call.grad_v.at(span, group));
}

#pragma GCC pop_options
#pragma GCC diagnostic pop

Plan plan_of(const CausalAttention& call) {
  const int64_t rows = call.q.size(0), tokens = call.q.size(2);
  return {.spans = spans_of(call.first_key, rows, tokens),
          .tokens = tokens,
          .heads = call.q.size(1),
          .groups = call.k.size(1),
          .width = call.q.size(3),
          .first_key = call.first_key.defined() ? call.first_key.const_data_ptr<int64_t>() : nullptr,
          .scale = static_cast<float>(call.scale)};
}

// Heads whose elements lie side by side, the others as they may.
at::Tensor with_dense_heads(const at::Tensor& tensor) { return tensor.stride(3) == 1 ? tensor : tensor.contiguous(); }

at::Tensor like_result(const at::Tensor& tensor) {
  return at::empty({tensor.size(0), tensor.size(2), tensor.size(1), tensor.size(3)}, tensor.options()).transpose(1, 2);
}

// One thread has all queries of a group of heads in a span, so that sums over them have one order.
template <class Unit>
void for_each_unit(const Plan& plan, const Unit& unit) {
  const auto count = static_cast<int64_t>(plan.spans.size()) * plan.groups;
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unit(plan.spans[static_cast<size_t>(i / plan.groups)], i % plan.groups);
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_forward_loops(const CausalAttention& call) {
  const auto plan = plan_of(call);
  const auto q = with_dense_heads(call.q), k = with_dense_heads(call.k), v = with_dense_heads(call.v);
  auto result = like_result(q);
  auto log_sums = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  const auto run = [&]<class T>(T) {
    for_each_unit(plan, [&](const Span& span, int64_t group) {
      forward_unit<T>(plan, span, group, heads_of<const T>(q), heads_of<const T>(k), heads_of<const T>(v),
                      heads_of<T>(result), log_sums.mutable_data_ptr<float>());
    });
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {result, log_sums};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_loops(const CausalAttention& call,
                                                                        const at::Tensor& grad,
                                                                        const at::Tensor& log_sums) {
  const auto plan = plan_of(call);
  const auto q = with_dense_heads(call.q), k = with_dense_heads(call.k), v = with_dense_heads(call.v);
  const auto dense_grad = with_dense_heads(grad);
  auto grad_q = like_result(q), grad_k = like_result(k), grad_v = like_result(v);
  const auto run = [&]<class T>(T) {
    const Backward<T> backward{.q = heads_of<const T>(q),
                               .k = heads_of<const T>(k),
                               .v = heads_of<const T>(v),
                               .grad = heads_of<const T>(dense_grad),
                               .log_sums = log_sums.const_data_ptr<float>(),
                               .grad_q = heads_of<T>(grad_q),
                               .grad_k = heads_of<T>(grad_k),
                               .grad_v = heads_of<T>(grad_v)};
    for_each_unit(plan, [&](const Span& span, int64_t group) { backward_unit<T>(plan, span, group, backward); });
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {grad_q, grad_k, grad_v};
}
#else
std::tuple<at::Tensor, at::Tensor> attention_forward_loops(const CausalAttention&) {
  raise(ErrorKind::kInternal, "[kernels.attention] not made for this processor");
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_loops(const CausalAttention&, const at::Tensor&,
                                                                        const at::Tensor&) {
  raise(ErrorKind::kInternal, "[kernels.attention] not made for this processor");
}
#endif

}  // namespace tessera::detail
