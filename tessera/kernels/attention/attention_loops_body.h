// The loops of attention_loops.cc, which includes this file once for each set of vector instructions.

#include "tessera/kernels/simd/lane_products_body.h"

// The keys of one block that a query sees: [low, high), counted from the block's first key.
struct VisibleKeys {
  int64_t low, high;
  bool all() const { return low <= 0 && high >= kBlock; }
  Mask lanes(int64_t at) const { return lanes_between(low - at, high - at); }
};
struct AllVisibleKeys {
  AllLanes lanes(int64_t) const { return {}; }
};
template <class Work>
auto with_visible_keys(const VisibleKeys& visible, const Work& work) {
  return visible.all() ? work(AllVisibleKeys{}) : work(visible);
}

// One step of the online softmax, for one query and one block of keys: replaces the scores by exp(score - maximum).
// When the maximum over all blocks so far grows, `sum` and `result` are rescaled to the new maximum.
template <class Seen>
void update_online_softmax(float* scores, const Seen& visible, float scale, float& running_max, float& sum,
                           float* result, int64_t width) {
  const Lanes least = fill(-std::numeric_limits<float>::infinity());
  Lanes values[kBlock / kLanes], peak = fill(running_max);
  bool has_nan = false;
  for (int64_t n = 0; n < kBlock / kLanes; ++n) {
    values[n] = select(visible.lanes(n * kLanes), mul(load_lanes(scores + n * kLanes), fill(scale)), least);
    has_nan |= any(not_numbers(values[n]));
    peak = max(peak, values[n]);  // may lose a NaN: max() returns its second operand if one is NaN
  }
  const float now = largest_of(peak);
  if (now == -std::numeric_limits<float>::infinity() && !has_nan) {
    for (int64_t n = 0; n < kBlock / kLanes; ++n) store_lanes(scores + n * kLanes, fill(0));
    return;
  }
  Lanes total = fill(0);
  for (int64_t n = 0; n < kBlock / kLanes; ++n) {
    const Lanes power = exp_lanes(sub(values[n], fill(now)));
    store_lanes(scores + n * kLanes, power);
    total = add(total, power);
  }
  if (now > running_max) {
    const float shrink = running_max == -std::numeric_limits<float>::infinity() ? 0.0F : std::exp(running_max - now);
    sum *= shrink;
    for (int64_t i = 0; i < width; i += kLanes) store_lanes(result + i, mul(load_lanes(result + i), fill(shrink)));
    running_max = now;
  }
  sum += sum_of(total);
}

template <class T>
void zero_tokens(const HeadStrides<T>& heads, const TokenSpan& span, int64_t head, int64_t width) {
  for (int64_t t = 0; t < span.tokens; ++t) std::fill_n(heads.at(span, head) + t * heads.token, width, T(0.0F));
}

// The forward of one TokenSpan and one group of heads, i.e. the query heads that share a key and value head. For each
// block of queries the loop goes over the visible blocks of keys and accumulates exp(score) V (`sums`), the maxima
// (`running_max`) and the sums of exponentials (`total`). The division by `total` at the end gives the softmax, so only
// one [kBlock, kBlock] block of scores exists at a time.
template <class T>
void forward_unit(const LoopPlan& plan, const TokenSpan& span, int64_t group, const HeadStrides<const T>& q,
                  const HeadStrides<const T>& k, const HeadStrides<const T>& v, const HeadStrides<T>& result,
                  float* log_sums) {
  const int64_t n = span.tokens, d = plan.width;
  if (plan.is_padding(span)) {
    for (int64_t head = group * plan.heads_of_group(); head < (group + 1) * plan.heads_of_group(); ++head) {
      zero_tokens(result, span, head, d);
      std::fill_n(log_sums + (span.row * plan.heads + head) * plan.tokens + span.begin, n, 0.0F);
    }
    return;
  }
  Scratch scratch(padded(n) * d + 2 * n * d + 2 * kBlock * d + kBlock * kBlock);
  float* const keys = scratch.allocate(padded(n) * d);
  float* const values = scratch.allocate(n * d);
  float* const plain = scratch.allocate(n * d);
  float* const queries = scratch.allocate(kBlock * d);
  float* const sums = scratch.allocate(kBlock * d);
  float* const scores = scratch.allocate(kBlock * kBlock);
  gather(k.at(span, group), k.token, n, d, plain);
  transpose_blocks(plain, n, d, keys);
  gather(v.at(span, group), v.token, n, d, values);
  for (int64_t head = group * plan.heads_of_group(); head < (group + 1) * plan.heads_of_group(); ++head) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      float running_max[kBlock], total[kBlock];
      std::fill_n(running_max, kBlock, -std::numeric_limits<float>::infinity());
      std::fill_n(total, kBlock, 0.0F);
      std::fill_n(sums, kBlock * d, 0.0F);
      gather(q.at(span, head) + begin * q.token, q.token, count, d, queries);
      for (int64_t block = plan.first_block(span, begin, count); block * kBlock <= begin; ++block) {
        const int64_t seen = std::min(kBlock, n - block * kBlock);
        multiply(count, kBlock, d, {queries, d, 1}, {keys + block * kBlock * d, kBlock}, scores, kBlock, false);
        for (int64_t r = 0; r < count; ++r) {
          const VisibleKeys visible{plan.first_of(span, begin + r) - block * kBlock, begin + r + 1 - block * kBlock};
          with_visible_keys(visible, [&](const auto& seen_keys) {
            update_online_softmax(scores + r * kBlock, seen_keys, plan.scale, running_max[r], total[r], sums + r * d,
                                  d);
          });
        }
        multiply(count, d, seen, {scores, kBlock, 1}, {values + block * kBlock * d, d}, sums, d, true);
      }
      for (int64_t r = 0; r < count; ++r) {
        const Lanes factor = fill(total[r] == 0 ? 0.0F : 1 / total[r]);
        for (int64_t i = 0; i < d; i += kLanes) {
          store_lanes(sums + r * d + i, mul(load_lanes(sums + r * d + i), factor));
        }
        log_sums[(span.row * plan.heads + head) * plan.tokens + span.begin + begin + r] =
            total[r] == 0 ? 0.0F : running_max[r] + std::log(total[r]);
      }
      scatter(sums, result.token, count, d, result.at(span, head) + begin * result.token);
    }
  }
}

// For one query and one block of keys: replaces `scores` by the softmax weights, computed from the saved log-sum-exp.
// Returns the sum over the keys of weight * gradient of the weight. `grad_probs` holds the gradients of the weights,
// the products of the result's gradient and the values.
template <class Seen>
float softmax_row(float* scores, const float* grad_probs, const Seen& visible, float scale, float log_sum) {
  Lanes sum = fill(0);
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    const auto lanes = visible.lanes(at);
    const Lanes shifted = fms(load_lanes(scores + at), fill(scale), fill(log_sum));
    const Lanes prob = select(lanes, exp_lanes(shifted), fill(0));
    store_lanes(scores + at, prob);
    sum = select(lanes, fma(prob, load_lanes(grad_probs + at), sum), sum);
  }
  return sum_of(sum);
}

// For one query and one block of keys: replaces `grad_probs` by the gradient of the scores, probs * (grad_probs - mean)
// * scale. `mean` is the sum of probs * grad_probs over all keys of the query.
template <class Seen>
void differentiate_row(const float* probs, float* grad_probs, const Seen& visible, float scale, float mean) {
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    const Lanes off = mul(sub(load_lanes(grad_probs + at), fill(mean)), fill(scale));
    store_lanes(grad_probs + at, select(visible.lanes(at), mul(load_lanes(probs + at), off), fill(0)));
  }
}

// The backward of one TokenSpan and one group of heads, i.e. the query heads that share a key and value head. For each
// block of queries: the first pass over the visible keys recomputes the weights P (`probs`) and their gradients dP = dO
// V^T (`grad_probs`), and the mean sum(P dP); the second pass makes dS = P (dP - mean) scale and adds P^T dO to dV,
// dS^T Q to dK and dS K to dQ. All heads of the group run in one call, so dK and dV are summed in a fixed order.
template <class T>
void backward_unit(const LoopPlan& plan, const TokenSpan& span, int64_t group, const BackwardTensors<T>& call) {
  const int64_t n = span.tokens, d = plan.width, first_head = group * plan.heads_of_group();
  if (plan.is_padding(span)) {
    zero_tokens(call.grad_k, span, group, d);
    zero_tokens(call.grad_v, span, group, d);
    for (int64_t i = 0; i < plan.heads_of_group(); ++i) zero_tokens(call.grad_q, span, first_head + i, d);
    return;
  }
  Scratch scratch(2 * padded(n) * d + 6 * n * d + 2 * kBlock * padded(n));
  float* const keys_t = scratch.allocate(padded(n) * d);
  float* const values_t = scratch.allocate(padded(n) * d);
  float* const scores =
      scratch.allocate(kBlock * padded(n));  // of one block of queries with all blocks of keys, one after another
  float* const grad_probs = scratch.allocate(kBlock * padded(n));
  float* const keys = scratch.allocate(n * d);
  float* const queries = scratch.allocate(n * d);
  float* const grads = scratch.allocate(n * d);
  float* const grad_q = scratch.allocate(n * d);  // holds the values first, until they are transposed
  float* const grad_k = scratch.allocate(n * d);
  float* const grad_v = scratch.allocate(n * d);
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
      const LeftMatrix own_queries{queries + begin * d, d, 1}, own_grads{grads + begin * d, d, 1};
      // The backward of softmax needs for each query sum(P dP), the mean of dP under the weights P. It is computed from
      // the recomputed weights. rowsum(dO O) is mathematically equal, but a result O in 16 bits has a rounding error,
      // which would enter dQ multiplied by the mean of the keys.
      float means[kBlock] = {};
      for (int64_t block = first; block * kBlock <= begin; ++block) {
        const int64_t at = block * kBlock;
        float *s = scores + at * kBlock, *p = grad_probs + at * kBlock;
        multiply(count, kBlock, d, own_queries, {keys_t + at * d, kBlock}, s, kBlock, false);
        multiply(count, kBlock, d, own_grads, {values_t + at * d, kBlock}, p, kBlock, false);
        for (int64_t r = 0; r < count; ++r) {
          const VisibleKeys visible{plan.first_of(span, begin + r) - at, begin + r + 1 - at};
          means[r] += with_visible_keys(visible, [&](const auto& seen_keys) {
            return softmax_row(s + r * kBlock, p + r * kBlock, seen_keys, plan.scale, log_sums[begin + r]);
          });
        }
      }
      for (int64_t block = first; block * kBlock <= begin; ++block) {
        const int64_t at = block * kBlock, seen = std::min(kBlock, n - at);
        float *s = scores + at * kBlock, *p = grad_probs + at * kBlock;
        for (int64_t r = 0; r < count; ++r) {
          const VisibleKeys visible{plan.first_of(span, begin + r) - at, begin + r + 1 - at};
          with_visible_keys(visible, [&](const auto& seen_keys) {
            differentiate_row(s + r * kBlock, p + r * kBlock, seen_keys, plan.scale, means[r]);
          });
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
