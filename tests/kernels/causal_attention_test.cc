// Tests blockwise causal attention against the formula in fp64: documents, windows, padding, grouped heads, both
// dtypes.
#include "tessera/kernels/attention/causal_attention.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/kernels/attention/attention_loops.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tests/kernels/gradients.h"
#include "tests/kernels/vector_levels.h"

namespace tessera {
namespace {

using testing::random_tensor;

struct Shape {
  int64_t rows, tokens, heads, groups, width;
};

struct Inputs {
  at::Tensor q, k, v, grad;
  std::vector<at::Tensor> wanted() const { return {q, k, v}; }
};

// The memory layout is the one of models: [B, T, heads, d] viewed as [B, heads, T, d].
at::Tensor heads(const Shape& shape, int64_t count, int seed, at::ScalarType type) {
  return random_tensor({shape.rows, shape.tokens, count, shape.width}, seed).to(type).transpose(1, 2);
}

Inputs inputs_of(const Shape& shape, at::ScalarType type) {
  return {heads(shape, shape.heads, 1, type), heads(shape, shape.groups, 2, type), heads(shape, shape.groups, 3, type),
          heads(shape, shape.heads, 4, type)};
}

// Returns the first key that each token attends to. Documents have `document` tokens, a token attends to at most
// `window` tokens of its document, and the last `padding` tokens attend to no key.
at::Tensor first_key_of(const Shape& shape, int64_t document, int64_t window, int64_t padding) {
  const auto place = at::arange(shape.tokens, at::kLong);
  auto first = at::maximum(place.div(document, "floor").mul(document), place - window + 1);
  if (padding > 0) {
    const auto last = shape.tokens - padding;
    first.narrow(0, last, padding).copy_(place.narrow(0, last, padding) + 1);
  }
  return first.expand({shape.rows, shape.tokens}).contiguous();
}

// Returns the result and the gradients of libtorch's attention with a mask, in fp64. Tokens without a visible key give
// zeros.
std::vector<at::Tensor> by_mask(const Inputs& in, const at::Tensor& first_key) {
  const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble).requires_grad_(); };
  const auto q = wide(in.q), k = wide(in.k), v = wide(in.v);
  const auto place = at::arange(q.size(2), at::kLong);
  auto seen = place.unsqueeze(0).le(place.unsqueeze(1)).unsqueeze(0).expand({q.size(0), -1, -1});
  if (first_key.defined()) seen = seen.logical_and(place.ge(first_key.unsqueeze(2)));
  const auto any = seen.any(-1).unsqueeze(1).unsqueeze(3);
  const auto mask = seen.logical_or(any.squeeze(1).logical_not()).unsqueeze(1);
  const auto y = at::where(any, at::scaled_dot_product_attention(q, k, v, mask, 0.0, false, std::nullopt, true), 0.0);
  y.backward(in.grad.to(at::kDouble));
  return {y.detach(), q.grad(), k.grad(), v.grad()};
}

std::vector<at::Tensor> by_kernel(const Inputs& in, const at::Tensor& first_key) {
  const auto leaf = [](const at::Tensor& t) { return t.detach().requires_grad_(); };
  const auto q = leaf(in.q), k = leaf(in.k), v = leaf(in.v);
  const auto y = kernels::causal_attention(q, k, v, {.first_key = first_key});
  y.backward(in.grad);
  return {y.detach(), q.grad(), k.grad(), v.grad()};
}

void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted, double tolerance) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double most = std::max(1.0, wanted[i].abs().max().item<double>());
    EXPECT_LT((got[i].to(at::kDouble) - wanted[i]).abs().max().item<double>(), tolerance * most) << "tensor " << i;
  }
}

constexpr Shape kShapes[] = {{2, 130, 4, 2, 32}, {1, 77, 2, 2, 80}, {1, 9, 3, 1, 16}};

class CausalAttention : public testing::WithVectorLevel {};
TESSERA_VECTOR_LEVELS(CausalAttention);

TEST_P(CausalAttention, EqualsMaskedAttentionOfDocumentsWindowsAndPadding) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const double tolerance = type == at::kFloat ? 3e-6 : type == at::kDouble ? 1e-12 : 1.5e-2;
    for (const auto& shape : kShapes) {
      const auto in = inputs_of(shape, type);
      const int64_t t = shape.tokens;
      for (const auto& first_key :
           {at::Tensor(), first_key_of(shape, 33, t, 0), first_key_of(shape, t, 5, 0), first_key_of(shape, 40, 70, 0),
            first_key_of(shape, 50, 20, t / 3), first_key_of(shape, 1, 1, 0), first_key_of(shape, t, t, t)}) {
        SCOPED_TRACE(::testing::Message() << c10::toString(type) << ", " << t << " tokens, " << shape.width << " wide");
        expect_close(by_kernel(in, first_key), by_mask(in, first_key), tolerance);
      }
    }
  }
}

TEST_P(CausalAttention, UsesItsOwnLoopsForShapesOfModels) {
  if (!kernels::has_attention_loops()) {
    GTEST_SKIP() << "no vectors here";
  }
  const auto in = inputs_of(kShapes[0], at::kFloat);
  EXPECT_TRUE(kernels::supports_causal_attention_loops(in.q, in.k, in.v));
  EXPECT_FALSE(
      kernels::supports_causal_attention_loops(in.q.to(at::kDouble), in.k.to(at::kDouble), in.v.to(at::kDouble)));
  EXPECT_FALSE(
      kernels::supports_causal_attention_loops(in.q.narrow(3, 0, 24), in.k.narrow(3, 0, 24), in.v.narrow(3, 0, 24)));
  EXPECT_FALSE(kernels::supports_causal_attention_loops(in.q.narrow(2, 0, 1), in.k, in.v));
}

TEST_P(CausalAttention, OtherDocumentsAndPaddingDoNotAffectTheResult) {
  if (!kernels::has_attention_loops()) {
    GTEST_SKIP() << "the formula multiplies what it does not see by zero";
  }
  const Shape shape{1, 100, 2, 1, 16};
  auto in = inputs_of(shape, at::kFloat);
  const auto first_key = first_key_of(shape, 30, 100, 10);  // documents begin at 0, 30, 60; padding from 90
  const auto before = by_kernel(in, first_key);
  for (auto& each : {in.q, in.k, in.v}) {
    each.narrow(2, 0, 30).fill_(1e30);
    each.narrow(2, 90, 10).fill_(std::numeric_limits<float>::quiet_NaN());
  }
  const auto after = by_kernel(in, first_key);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(before[i].narrow(2, 30, 60), after[i].narrow(2, 30, 60))) << i;
    EXPECT_TRUE(after[i].narrow(2, 90, 10).eq(0).all().item<bool>()) << i;
  }
}

TEST_P(CausalAttention, ResultsAreBitwiseEqualForAnyNumberOfThreads) {
  const auto in = inputs_of({3, 150, 4, 2, 32}, at::kFloat);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = by_kernel(in, {});
  at::set_num_threads(3);
  const auto three = by_kernel(in, {});
  at::set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << i;
}

TEST_P(CausalAttention, NanPropagates) {
  const Shape shape{1, 70, 1, 1, 16};
  auto in = inputs_of(shape, at::kFloat);
  in.k[0][0][3].fill_(std::numeric_limits<float>::quiet_NaN());
  const auto y = kernels::causal_attention(in.q, in.k, in.v);
  EXPECT_FALSE(y.narrow(2, 0, 3).isnan().any().item<bool>());
  EXPECT_TRUE(y.narrow(2, 3, 67).isnan().all().item<bool>());
}

// The first query attends to one key only, which is in the first lane of a vector of several.
TEST_P(CausalAttention, NanInTheOnlyScoreOfAQueryPropagates) {
  auto in = inputs_of({1, 70, 1, 1, 16}, at::kFloat);
  in.k[0][0][0].fill_(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(kernels::causal_attention(in.q, in.k, in.v).isnan().all().item<bool>());
}

TEST_P(CausalAttention, NegativeFirstKeysAndVisiblePaddingEqualTheMaskedForm) {
  const auto in = inputs_of({1, 70, 2, 1, 16}, at::kFloat);
  const auto all = by_kernel(in, {});
  const auto before = by_kernel(in, at::full({1, 70}, -100, at::kLong));
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(before[i], all[i])) << i;
  auto first = at::zeros({1, 70}, at::kLong);
  first.narrow(1, 20, 50).fill_(20);
  first[0][20] = 60;  // sees no key, but is a visible key
  const auto wanted = by_mask(in, first), got = by_kernel(in, first);
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_LT((got[i] - wanted[i]).abs().max().item<double>(), 1e-4) << i;
}

TEST_P(CausalAttention, UsesResultsKeptBySelectiveCheckpointing) {
  const auto in = inputs_of(kShapes[0], at::kFloat);
  const auto wanted = by_kernel(in, {});
  const auto kept = std::make_shared<kernels::ActivationCheckpointCache>();
  {
    const at::NoGradGuard no_grad;
    const kernels::ActivationCheckpointCache::Scope record(kept, kernels::ActivationCheckpointCache::Mode::kRecord);
    kernels::causal_attention(in.q, in.k, in.v);
  }
  const kernels::ActivationCheckpointCache::Scope replay(kept, kernels::ActivationCheckpointCache::Mode::kReplay);
  const auto got = by_kernel(in, {});
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
}

TEST_P(CausalAttention, RefusesInvalidShapes) {
  const auto in = inputs_of(kShapes[0], at::kFloat);
  EXPECT_THROW(kernels::causal_attention(in.q, in.k.narrow(2, 0, 9), in.v.narrow(2, 0, 9)), Error);
  EXPECT_THROW(kernels::causal_attention(in.q, in.k, in.v, {.first_key = at::zeros({2, 9}, at::kLong)}), Error);
}

}  // namespace
}  // namespace tessera
