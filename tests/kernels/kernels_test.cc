// Tests the fused kernels on one rank against plain operations: linear, norms, rotary positions, gates, and the linear
// cross entropy. Values, gradients and second derivatives are compared.
#include <ATen/native/Resize.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>

#include <cstring>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/linear/linear_choice.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/kernels/rows/rms_norm.h"
#include "tessera/kernels/rows/rotary.h"
#include "tests/kernels/gradients.h"

namespace tessera {
namespace {

using testing::expect_same_with_gradients;
using ::testing::HasSubstr;
using testing::Op;
using testing::random_tensor;
using ::testing::ThrowsMessage;
using Tensors = std::vector<at::Tensor>;

at::Tensor plain_rms_norm(const Tensors& in) {
  return in[1] * (in[0] * at::rsqrt(in[0].square().mean(-1, true) + 1e-5));
}

at::Tensor plain_rotary(const Tensors& in, const at::Tensor& cos, const at::Tensor& sin) {
  const auto x = in[0];
  const auto c = at::cat({cos, cos}, -1).unsqueeze(2), s = at::cat({sin, sin}, -1).unsqueeze(2);
  const auto halves = x.chunk(2, -1);
  return x * c + at::cat({-halves[1], halves[0]}, -1) * s;
}

at::Tensor plain_loss(const Tensors& in, const at::Tensor& labels) {
  return at::cross_entropy_loss(at::linear(in[0], in[1]), labels, {}, at::Reduction::Sum, kIgnoredLabel);
}

// Each test runs with both kernels for a product, whichever kernel this machine would choose.
class Linear : public ::testing::TestWithParam<bool> {
 protected:
  kernels::LinearKernelGuard kernel_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Kernels, Linear, ::testing::Bool(),
                         [](const auto& kernel) { return kernel.param ? "OneDnn" : "Aten"; });

TEST_P(Linear, MatchesAtLinearWithGradientsForEveryShape) {
  for (const auto& [rows, in, out] :
       std::vector<std::array<int64_t, 3>>{{64, 48, 80}, {1, 32, 32}, {17, 16, 16}, {129, 257, 33}}) {
    const Tensors inputs = {random_tensor({rows, in}), random_tensor({out, in}, 1), random_tensor({out}, 2)};
    expect_same_with_gradients([](const Tensors& t) { return tessera::kernels::linear(t[0], t[1], t[2]); },
                               [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }, inputs, 1e-5);
    expect_same_with_gradients([](const Tensors& t) { return tessera::kernels::linear(t[0], t[1]); },
                               [](const Tensors& t) { return at::linear(t[0], t[1]); }, {inputs[0], inputs[1]}, 1e-5);
  }
}

TEST_P(Linear, SupportsBatchedAndStridedInput) {
  const Tensors inputs = {random_tensor({4, 32, 40}), random_tensor({24, 32}, 1)};
  expect_same_with_gradients([](const Tensors& t) { return tessera::kernels::linear(t[0].transpose(1, 2), t[1]); },
                             [](const Tensors& t) { return at::linear(t[0].transpose(1, 2), t[1]); }, inputs, 1e-5);
}

thread_local int plain_products = 0;

TEST_P(Linear, RequestedKernelIsTheOneThatRuns) {
  const auto count = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    plain_products += std::string_view(call.name()) == "aten::linear";
    return nullptr;
  };
  const auto observer = at::addThreadLocalCallback(at::RecordFunctionCallback(count));
  plain_products = 0;
  tessera::kernels::linear(random_tensor({64, 48}).set_requires_grad(true), random_tensor({80, 48}, 1));
  at::removeCallback(observer);
  EXPECT_EQ(plain_products, GetParam() ? 0 : 1);
}

TEST_P(Linear, SupportsABiasOfAnotherDtypeForAnyInputLayout) {
  for (const bool transposed : {false, true}) {
    const auto x = transposed ? random_tensor({5, 4, 3}).transpose(0, 2) : random_tensor({3, 4, 5});
    const auto weight = random_tensor({6, 5}, 1), bias = random_tensor({6}, 2).to(at::kDouble);
    const auto y = tessera::kernels::linear(x, weight, bias);
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_LT(testing::relative_error(y, at::linear(x, weight, bias.to(at::kFloat))), 1e-6);
  }
}

TEST_P(Linear, RefusesABiasOfTheWrongSize) {
  EXPECT_THAT(
      [] {
        tessera::kernels::linear(random_tensor({3, 4}), random_tensor({5, 4}), random_tensor({1}));
      },
      ThrowsMessage<Error>(HasSubstr("x [3, 4], weight [5, 4], bias [1]: wanted [..., in], [out, in] and [out]")));
}

TEST_P(Linear, SupportsComplexNumbers) {
  const Tensors inputs = {random_tensor({20, 24}), random_tensor({20, 24}, 1), random_tensor({18, 24}, 2),
                          random_tensor({18, 24}, 3)};
  const auto by = [](auto product) {
    return [product](const Tensors& t) {
      return at::view_as_real(product(at::complex(t[0], t[1]), at::complex(t[2], t[3])));
    };
  };
  expect_same_with_gradients(by([](const auto& x, const auto& weight) { return tessera::kernels::linear(x, weight); }),
                             by([](const auto& x, const auto& weight) { return at::linear(x, weight); }), inputs, 1e-5);
}

// A product has a gradient of its gradient, as at::linear has.
TEST_P(Linear, HasASecondDerivative) {
  const auto second = [](const Op& product) {
    const auto x = random_tensor({32, 24}).set_requires_grad(true),
               weight = random_tensor({20, 24}, 1).set_requires_grad(true);
    const auto y = product({x, weight}).square().sum();
    const auto first = torch::autograd::grad({y}, {x, weight}, {}, true, true);
    (first[0].square().sum() + first[1].square().sum()).backward();
    return std::pair(x.grad(), weight.grad());
  };
  const auto found = second([](const Tensors& t) { return tessera::kernels::linear(t[0], t[1]); });
  const auto wanted = second([](const Tensors& t) { return at::linear(t[0], t[1]); });
  EXPECT_LT(testing::relative_error(found.first, wanted.first), 1e-5);
  EXPECT_LT(testing::relative_error(found.second, wanted.second), 1e-5);
}

TEST_P(Linear, BackwardSurvivesAWeightThatIsFreedAfterForwardAndRefilled) {
  const auto x = random_tensor({32, 32}).set_requires_grad(true);
  auto values = random_tensor({48, 32}, 3);
  auto weight = at::empty({0}).set_(at::empty({48 * 32}).storage(), 0, {48, 32}, {32, 1});
  weight.copy_(values);
  weight.set_requires_grad(true);
  const auto y = tessera::kernels::linear(x, weight);
  auto* storage = weight.storage().unsafeGetStorageImpl();
  at::native::resize_bytes_cpu(storage, 0);
  at::native::resize_bytes_cpu(storage, 48 * 32 * sizeof(float));
  std::memcpy(storage->mutable_data(), values.const_data_ptr(), values.nbytes());
  y.sum().backward();
  EXPECT_LT(testing::relative_error(x.grad(), at::ones({32, 48}).mm(values)), 1e-5);
  EXPECT_LT(testing::relative_error(weight.grad(), at::ones({48, 32}).mm(x.detach())), 1e-5);
}

TEST_P(Linear, ProductSupportsTransposedViews) {
  const auto a = random_tensor({40, 70}), b = random_tensor({40, 33}, 1);
  EXPECT_LT(testing::relative_error(kernels::product_nt(a.t(), b.t()), a.t().mm(b)), 1e-5);
  EXPECT_LT(testing::relative_error(kernels::product_nt(a.narrow(1, 8, 24).t(), b.t()), a.narrow(1, 8, 24).t().mm(b)),
            1e-5);
}

TEST(SecondDerivatives, NormsAndGatesMatchPlainOps) {
  const auto second = [](const Op& op, const Tensors& given, at::ScalarType type) {
    Tensors inputs;
    for (const auto& input : given) inputs.push_back(input.to(type, false, /*copy=*/true).set_requires_grad(true));
    const auto y = op(inputs);
    const auto first = torch::autograd::grad({y.sin().sum()}, inputs, {}, true, true);
    (first[0].cos() * y).sum().add(first[1].square().sum()).backward();
    return Tensors{inputs[0].grad(), inputs[1].grad()};
  };
  const Tensors rows = {random_tensor({3, 5, 48}), random_tensor({48}, 1)};
  const Tensors pairs = {random_tensor({6, 32}), random_tensor({6, 32}, 1)};
  const std::vector<std::tuple<Op, Op, Tensors>> cases = {
      {[](const Tensors& t) { return tessera::kernels::rms_norm(t[0], t[1], 1e-5); }, plain_rms_norm, rows},
      {[](const Tensors& t) { return tessera::kernels::rms_norm(t[0], t[1], 1e-5, /*one_plus=*/true); },
       [](const Tensors& t) {
         return plain_rms_norm({t[0], t[1] + 1});
       },
       rows},
      {[](const Tensors& t) { return tessera::kernels::swiglu(t[0], t[1]); },
       [](const Tensors& t) { return t[0] * at::sigmoid(t[0]) * t[1]; }, pairs},
      {[](const Tensors& t) { return tessera::kernels::geglu(t[0], t[1]); },
       [](const Tensors& t) { return at::gelu(t[0], "tanh") * t[1]; }, pairs}};
  for (const auto& [fused, plain, inputs] : cases) {
    const auto wanted = second(plain, inputs, at::kDouble);
    for (const auto& [type, tolerance] : {std::pair{at::kDouble, 1e-9}, {at::kFloat, 1e-4}}) {
      const auto found = second(fused, inputs, type);
      for (size_t i = 0; i < 2; ++i) EXPECT_LT(testing::relative_error(found[i], wanted[i]), tolerance) << i;
    }
  }
}

TEST(RmsNorm, MatchesPlainOpsWithGradients) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{3, 5, 48}, {1, 3}, {700, 33}, {2000, 16}}) {
    expect_same_with_gradients([](const Tensors& t) { return tessera::kernels::rms_norm(t[0], t[1], 1e-5); },
                               plain_rms_norm, {random_tensor(sizes), random_tensor({sizes.back()}, 1)}, 1e-5);
  }
}

TEST(RmsNorm, RoundsOnceInHalfPrecision) {
  const auto x = random_tensor({9, 64}).to(at::kBFloat16), weight = random_tensor({64}, 1).to(at::kBFloat16);
  expect_same_with_gradients([](const Tensors& t) { return tessera::kernels::rms_norm(t[0], t[1], 1e-5); },
                             plain_rms_norm, {x, weight}, 2e-2);
  // The order of transformers is tested: normalise in fp32, round, then multiply in bf16.
  const auto wide = x.to(at::kFloat);
  const auto upstream = weight * (wide * at::rsqrt(wide.square().mean(-1, true) + 1e-5)).to(at::kBFloat16);
  EXPECT_TRUE(at::equal(tessera::kernels::rms_norm(x, weight, 1e-5), upstream));
}

at::Tensor plain_one_plus_norm(const Tensors& t) {
  return (1 + t[1]) * t[0] * at::rsqrt(t[0].square().mean(-1, true) + 1e-5);
}

TEST(RmsNorm, OnePlusWeightMatchesPlainOpsWithGradients) {
  const auto fused = [](const Tensors& t) { return tessera::kernels::rms_norm(t[0], t[1], 1e-5, /*one_plus=*/true); };
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{3, 5, 48}, {1, 3}, {700, 33}}) {
    const Tensors inputs = {random_tensor(sizes), random_tensor({sizes.back()}, 1)};
    expect_same_with_gradients(fused, plain_one_plus_norm, inputs, 1e-5);
    expect_same_with_gradients(fused, plain_one_plus_norm, {inputs[0].to(at::kBFloat16), inputs[1].to(at::kBFloat16)},
                               2e-2);
  }
  // The order of transformers is tested: compute all in fp32 and round at the end.
  const auto x = random_tensor({9, 64}).to(at::kBFloat16), weight = random_tensor({64}, 1).to(at::kBFloat16);
  const auto wide = x.to(at::kFloat);
  const auto upstream = (wide * at::rsqrt(wide.square().mean(-1, true) + 1e-5) * (1.0 + weight.to(at::kFloat)));
  EXPECT_TRUE(at::equal(fused({x, weight}), upstream.to(at::kBFloat16)));
}

TEST(Rotary, MatchesHalfRotationWithGradients) {
  for (const int64_t batch : {1, 3}) {
    const auto angles = random_tensor({batch, 7, 8}, 4);
    const auto cos = angles.cos(), sin = angles.sin();
    expect_same_with_gradients(
        [&](const Tensors& t) { return kernels::rotary(t[0], cos, sin); },
        [&](const Tensors& t) { return plain_rotary(t, cos.to(at::kDouble), sin.to(at::kDouble)); },
        {random_tensor({3, 7, 5, 16})}, 1e-5);
    expect_same_with_gradients(
        [&](const Tensors& t) { return kernels::rotary(t[0], cos, sin); },
        [&](const Tensors& t) { return plain_rotary(t, cos.to(at::kDouble), sin.to(at::kDouble)); },
        {random_tensor({3, 7, 5, 16}).to(at::kBFloat16)}, 2e-2);
  }
}

TEST(SwiGlu, MatchesPlainOpsWithGradients) {
  expect_same_with_gradients([](const Tensors& t) { return kernels::swiglu(t[0], t[1]); },
                             [](const Tensors& t) { return at::silu(t[0]) * t[1]; },
                             {random_tensor({3, 40}), random_tensor({3, 40}, 1)}, 1e-5);
}

TEST(GeGlu, MatchesPlainOpsWithGradients) {
  expect_same_with_gradients([](const Tensors& t) { return kernels::geglu(t[0], t[1]); },
                             [](const Tensors& t) { return at::gelu(t[0], "tanh") * t[1]; },
                             {random_tensor({3, 40}), random_tensor({3, 40}, 1)}, 1e-5);
}

TEST(LinearCrossEntropy, CappedLogitsMatchPlainLossWithGradientsForAnyChunkSize) {
  const auto labels = at::tensor(std::vector<int64_t>{3, kIgnoredLabel, 0, 49, 7, kIgnoredLabel, 21, 3, 3, 48, 12});
  const Tensors inputs = {random_tensor({11, 24}), random_tensor({50, 24}, 1)};
  for (const int64_t chunk_bytes : {1, 600, 1 << 20}) {
    expect_same_with_gradients(
        [&](const Tensors& t) {
          return kernels::linear_cross_entropy(t[0], t[1], labels, {.chunk_bytes = chunk_bytes, .softcap = 3.0});
        },
        [&](const Tensors& t) {
          const auto logits = (at::linear(t[0], t[1]) / 3.0).tanh() * 3.0;
          return at::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, kIgnoredLabel);
        },
        inputs, 1e-5);
  }
}

TEST(LinearCrossEntropy, MatchesPlainLossWithGradientsForAnyChunkSize) {
  const auto labels = at::tensor(std::vector<int64_t>{3, kIgnoredLabel, 0, 49, 7, kIgnoredLabel, 21, 3, 3, 48, 12});
  const Tensors inputs = {random_tensor({11, 24}), random_tensor({50, 24}, 1)};
  for (const int64_t chunk_bytes : {1, 600, 1 << 20}) {
    expect_same_with_gradients(
        [&](const Tensors& t) {
          return kernels::linear_cross_entropy(t[0], t[1], labels, {.chunk_bytes = chunk_bytes});
        },
        [&](const Tensors& t) { return plain_loss(t, labels); }, inputs, 1e-5);
  }
}

TEST(LinearCrossEntropy, AccumulatesTheHeadsGradientOverBlocks) {
  const auto labels = at::arange(0, 20000, 1000, at::kLong);
  expect_same_with_gradients(
      [&](const Tensors& t) { return kernels::linear_cross_entropy(t[0], t[1], labels, {.chunk_bytes = 7 * 80000}); },
      [&](const Tensors& t) { return plain_loss(t, labels); }, {random_tensor({20, 16}), random_tensor({20000, 16}, 1)},
      1e-5);
}

TEST(LinearCrossEntropy, BackwardNeedsNeitherHiddenNorWeight) {
  auto weight = random_tensor({32, 16}, 1), hidden = random_tensor({20, 16});
  const auto labels = at::arange(20, at::kLong);
  const auto wanted = [&] {
    auto w = weight.clone().set_requires_grad(true);
    plain_loss({hidden, w}, labels).backward();
    return w.grad();
  }();
  weight.set_requires_grad(true);
  const auto loss = kernels::linear_cross_entropy(hidden, weight, labels);
  weight.detach().fill_(std::numeric_limits<float>::quiet_NaN());
  loss.backward();
  EXPECT_LT(testing::relative_error(weight.grad(), wanted), 1e-5);
}

TEST(LinearCrossEntropy, SecondBackwardOfARetainedGraphGivesTheSameGradient) {
  auto weight = random_tensor({32, 16}, 1).set_requires_grad(true),
       hidden = random_tensor({20, 16}).set_requires_grad(true);
  const auto loss = kernels::linear_cross_entropy(hidden, weight, at::arange(20, at::kLong)) / 20;
  loss.backward({}, /*retain_graph=*/true);
  const auto once = weight.grad().clone();
  loss.backward();
  EXPECT_LT(testing::relative_error(weight.grad(), once * 2), 1e-6);
}

TEST(LinearCrossEntropy, AllLabelsIgnoredGiveZeroLossAndGradients) {
  auto weight = random_tensor({32, 16}, 1).set_requires_grad(true),
       hidden = random_tensor({4, 16}).set_requires_grad(true);
  const auto loss = kernels::linear_cross_entropy(hidden, weight, at::full({4}, kIgnoredLabel, at::kLong));
  EXPECT_EQ(loss.item<float>(), 0.0F);
  loss.backward();
  EXPECT_EQ(weight.grad().abs().sum().item<float>(), 0.0F);
  EXPECT_EQ(hidden.grad().abs().sum().item<float>(), 0.0F);
}

TEST(LinearCrossEntropy, OnTheMetaDeviceNothingIsComputed) {
  const auto hidden =
      at::empty({4, 16}, at::TensorOptions().device(at::kMeta).dtype(at::kBFloat16)).set_requires_grad(true);
  const auto weight = at::empty({1 << 30, 16}, hidden.options()),
             labels = at::empty({4}, hidden.options().dtype(at::kLong));
  const auto loss = kernels::linear_cross_entropy(hidden, weight, labels);
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  loss.backward();
  EXPECT_EQ(hidden.grad().sizes(), hidden.sizes());
}

TEST(LinearCrossEntropy, LabelOutsideTheVocabularyIsAnError) {
  const auto hidden = random_tensor({3, 16}), weight = random_tensor({32, 16});
  for (const int64_t wrong : {32, -1, -101}) {
    try {
      kernels::linear_cross_entropy(hidden, weight, at::tensor(std::vector<int64_t>{1, wrong, 2}));
      FAIL() << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kShape);
      EXPECT_NE(std::string(error.what()).find(fmt::format("label 1: found {}", wrong)), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera
