#include "tessera/kernels/attention/attention_loops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/kernels/simd/lanes_avx2.h"
#include "tessera/kernels/simd/lanes_avx512.h"

namespace tessera::kernels {

bool has_attention_loops() { return has_lanes(); }

#ifdef TESSERA_HAS_LANES
namespace {

constexpr int64_t kBlock = 64;  // queries and keys of a block of scores

int64_t padded(int64_t tokens) { return (tokens + kBlock - 1) / kBlock * kBlock; }

// Consecutive tokens of a row that see only keys of these tokens: a document, or a run of padding.
struct TokenSpan {
  int64_t row, begin, tokens;
};

// Splits each row into spans, from the last token to the first. A span is a run of tokens that see no keys before the
// span. `least` is the first key that any token of the current span sees, so token t can begin the span if `least` is
// not before t. Neighbouring padding tokens form one span.
std::vector<TokenSpan> spans_of(const at::Tensor& first_key, int64_t rows, int64_t tokens) {
  std::vector<TokenSpan> spans;
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

// Scratch memory of one unit of work (one span and one group of heads). allocate(floats) returns the next `floats`
// floats of it.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(static_cast<float*>(::operator new[](static_cast<size_t>(floats) * sizeof(float), std::align_val_t(64)))),
        next_(data_.get()) {}
  float* allocate(int64_t floats) { return std::exchange(next_, next_ + floats); }

 private:
  std::unique_ptr<float, FreeFloats> data_;
  float* next_;
};

// The parameters of one call, which all its units of work share. A unit is one span and one group of heads.
struct LoopPlan {
  std::vector<TokenSpan> spans;
  int64_t tokens, heads, groups, width;
  const int64_t* first_key;  // int64 [B, T]; null: 0
  float scale;

  int64_t heads_of_group() const { return heads / groups; }
  int64_t first_of(const TokenSpan& span, int64_t t) const {  // relative to the span's first token
    return first_key == nullptr ? 0 : first_key[span.row * tokens + span.begin + t] - span.begin;
  }
  bool is_padding(const TokenSpan& span) const {  // no token of the span sees a key
    for (int64_t t = 0; t < span.tokens; ++t) {
      if (first_of(span, t) <= t) return false;
    }
    return true;
  }
  // Returns the index of the first block of keys that some query of [begin, begin + count) sees.
  int64_t first_block(const TokenSpan& span, int64_t begin, int64_t count) const {
    int64_t first = begin;
    for (int64_t t = begin; t < begin + count; ++t) first = std::min(first, first_of(span, t));
    return first / kBlock;
  }
};

template <class T>
struct HeadStrides {  // [B, heads, T, d] with contiguous d; row, head and token are strides
  T* data;
  int64_t row, head, token;
  T* at(const TokenSpan& span, int64_t h) const { return data + span.row * row + h * head + span.begin * token; }
};

template <class T>
HeadStrides<T> head_strides(const at::Tensor& tensor) {
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
struct BackwardTensors {
  HeadStrides<const T> q, k, v, grad;
  const float* log_sums;
  HeadStrides<T> grad_q, grad_k, grad_v;
};

// attention_loops_body.h is compiled twice, for AVX-512 and for AVX2. for_lanes() selects one of them at run time.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false positives in GCC 12's own intrinsics headers
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace attention_avx512 {
using namespace lanes_avx512;
#include "tessera/kernels/attention/attention_loops_body.h"
}  // namespace attention_avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace attention_avx2 {
using namespace lanes_avx2;
#include "tessera/kernels/attention/attention_loops_body.h"
}  // namespace attention_avx2
#pragma GCC pop_options
#pragma GCC diagnostic pop

LoopPlan plan_of(const CausalAttentionCall& call) {
  const int64_t rows = call.q.size(0), tokens = call.q.size(2);
  return {.spans = spans_of(call.first_key, rows, tokens),
          .tokens = tokens,
          .heads = call.q.size(1),
          .groups = call.k.size(1),
          .width = call.q.size(3),
          .first_key = call.first_key.defined() ? call.first_key.const_data_ptr<int64_t>() : nullptr,
          .scale = static_cast<float>(call.scale)};
}

// Returns the tensor, copied if its last dim (the elements of a head) is not contiguous. Other dims may have any
// strides.
at::Tensor with_dense_heads(const at::Tensor& tensor) { return tensor.stride(3) == 1 ? tensor : tensor.contiguous(); }

// Returns an empty tensor [B, H, T, d] with the memory layout [B, T, H, d], which the output projection reads without a
// copy.
at::Tensor like_result(const at::Tensor& tensor) {
  return at::empty({tensor.size(0), tensor.size(2), tensor.size(1), tensor.size(3)}, tensor.options()).transpose(1, 2);
}

// Calls `unit` once for each pair of a TokenSpan and a group of heads: the query heads that share one key-value head.
// One unit computes all queries of its span for the heads of its group. So no two threads add to the same gradient, and
// sums have the same order for any number of threads.
template <class Unit>
void for_each_unit(const LoopPlan& plan, const Unit& unit) {
  // Calls of `unit` do not depend on each other: no token of a span sees a key of another span, and each group of heads
  // has its own keys, values and gradients.
  const auto count = static_cast<int64_t>(plan.spans.size()) * plan.groups;
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unit(plan.spans[static_cast<size_t>(i / plan.groups)], i % plan.groups);
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_forward_loops(const CausalAttentionCall& call) {
  const auto plan = plan_of(call);
  const auto q = with_dense_heads(call.q), k = with_dense_heads(call.k), v = with_dense_heads(call.v);
  auto result = like_result(q);
  auto log_sums = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  const auto run = [&]<class T>(T) {
    const auto unit = for_lanes(attention_avx512::forward_unit<T>, attention_avx2::forward_unit<T>);
    for_each_unit(plan, [&](const TokenSpan& span, int64_t group) {
      unit(plan, span, group, head_strides<const T>(q), head_strides<const T>(k), head_strides<const T>(v),
           head_strides<T>(result), log_sums.mutable_data_ptr<float>());
    });
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {result, log_sums};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_loops(const CausalAttentionCall& call,
                                                                        const at::Tensor& grad,
                                                                        const at::Tensor& log_sums) {
  const auto plan = plan_of(call);
  const auto q = with_dense_heads(call.q), k = with_dense_heads(call.k), v = with_dense_heads(call.v);
  const auto dense_grad = with_dense_heads(grad);
  auto grad_q = like_result(q), grad_k = like_result(k), grad_v = like_result(v);
  const auto run = [&]<class T>(T) {
    const BackwardTensors<T> backward{.q = head_strides<const T>(q),
                                      .k = head_strides<const T>(k),
                                      .v = head_strides<const T>(v),
                                      .grad = head_strides<const T>(dense_grad),
                                      .log_sums = log_sums.const_data_ptr<float>(),
                                      .grad_q = head_strides<T>(grad_q),
                                      .grad_k = head_strides<T>(grad_k),
                                      .grad_v = head_strides<T>(grad_v)};
    const auto unit = for_lanes(attention_avx512::backward_unit<T>, attention_avx2::backward_unit<T>);
    for_each_unit(plan, [&](const TokenSpan& span, int64_t group) { unit(plan, span, group, backward); });
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {grad_q, grad_k, grad_v};
}
#else
std::tuple<at::Tensor, at::Tensor> attention_forward_loops(const CausalAttentionCall&) {
  raise(ErrorKind::kInternal, "[kernels.attention] the CPU loops were not compiled for this processor");
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_loops(const CausalAttentionCall&, const at::Tensor&,
                                                                        const at::Tensor&) {
  raise(ErrorKind::kInternal, "[kernels.attention] the CPU loops were not compiled for this processor");
}
#endif

}  // namespace tessera::kernels
