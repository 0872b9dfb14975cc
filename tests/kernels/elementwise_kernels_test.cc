// Tests the row kernels in fp32 and bf16 against the formulas in fp64. The sizes leave a remainder after whole vectors.
// Each test runs with each set of vector instructions that this processor has.
#include "tessera/kernels/rows/elementwise_kernels.h"

#include <gtest/gtest.h>

#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/kernels/rows/rms_norm.h"
#include "tessera/kernels/rows/rotary.h"
#include "tests/kernels/gradients.h"
#include "tests/kernels/vector_levels.h"

namespace tessera {
namespace {

using testing::random_tensor;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

// Returns the result and the gradients. The gradient of the result is not constant.
Tensors with_gradients(const Function& f, const Tensors& given, at::ScalarType type) {
  Tensors in;
  for (const auto& each : given) in.push_back(each.to(type).detach().requires_grad_());
  const auto y = f(in);
  y.backward(random_tensor({y.numel()}, 9).view(y.sizes()).to(y.scalar_type()));
  Tensors out = {y.detach()};
  for (const auto& each : in) out.push_back(each.grad());
  return out;
}

void expect_alike(const Function& kernel, const Function& formula, const Tensors& in, double of_bf16 = 1.2e-2) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(c10::toString(type));
    Tensors rounded;
    for (const auto& each : in) rounded.push_back(each.to(type));
    const auto got = with_gradients(kernel, rounded, type);
    const auto wanted = with_gradients(formula, rounded, at::kDouble);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), type);
      const double most = wanted[i].abs().max().item<double>();
      EXPECT_LE((got[i].to(at::kDouble) - wanted[i]).abs().max().item<double>(),
                (type == at::kFloat ? 2e-6 : of_bf16) * most)
          << "tensor " << i;
    }
  }
}

class ElementwiseKernels : public testing::WithVectorLevel {};
TESSERA_VECTOR_LEVELS(ElementwiseKernels);

TEST_P(ElementwiseKernels, GatesWorkForAnyNumberOfElements) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {15}, {16}, {3, 37}, {130, 257}}) {
    const Tensors in = {random_tensor(shape) * 4, random_tensor(shape, 1)};
    expect_alike([](const Tensors& t) { return kernels::swiglu(t[0], t[1]); },
                 [](const Tensors& t) { return at::silu(t[0]) * t[1]; }, in);
    expect_alike([](const Tensors& t) { return kernels::geglu(t[0], t[1]); },
                 [](const Tensors& t) { return at::gelu(t[0], "tanh") * t[1]; }, in);
  }
}

TEST_P(ElementwiseKernels, GatesOfExtremeValuesAreCorrect) {
  const auto x = at::tensor({-std::numeric_limits<float>::infinity(), -1e4F, -88.0F, 0.0F, 88.0F, 1e4F});
  const auto y = kernels::swiglu(x, at::ones_like(x));
  EXPECT_TRUE(at::equal(y.narrow(0, 3, 3), x.narrow(0, 3, 3)));
  EXPECT_EQ(y[1].item<float>(), 0);
  EXPECT_TRUE(kernels::swiglu(at::full({3}, std::nan("")), at::ones({3})).isnan().all().item<bool>());
}

TEST_P(ElementwiseKernels, NormsWorkForEvenAndUnevenRows) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1, 16}, {5, 48}, {70, 9}, {3, 41, 64}}) {
    const Tensors in = {random_tensor(shape), random_tensor({shape.back()}, 1)};
    for (const bool one_plus : {false, true}) {
      expect_alike([=](const Tensors& t) { return kernels::rms_norm(t[0], t[1], 1e-5, one_plus); },
                   [=](const Tensors& t) {
                     return (one_plus ? t[1] + 1 : t[1]) * t[0] * at::rsqrt(t[0].square().mean(-1, true) + 1e-5);
                   },
                   in);
    }
  }
}

// transformers rounds normed values to the model's dtype before it multiplies them with the weight.
TEST_P(ElementwiseKernels, NormsRoundInBf16AsTransformersDoes) {
  const auto x = random_tensor({64, 96}).to(at::kBFloat16), weight = random_tensor({96}, 1).to(at::kBFloat16);
  const auto wide = x.to(at::kFloat);
  const auto normed = (wide * at::rsqrt(wide.square().mean(-1, true) + 1e-5)).to(at::kBFloat16);
  const auto differ = kernels::rms_norm(x, weight, 1e-5).ne(weight * normed).sum().item<int64_t>();
  EXPECT_LE(differ, x.numel() / 1000);  // another order of a sum may change a rounding
}

TEST_P(ElementwiseKernels, RotarySupportsDifferentAnglesPerRow) {
  for (const int64_t width : {6, 32, 64}) {
    for (const int64_t rows : {1, 3}) {
      const auto angles = random_tensor({rows, 7, width / 2}, 1).to(at::kFloat);
      expect_alike([&](const Tensors& t) { return kernels::rotary(t[0], angles.cos(), angles.sin()); },
                   [&](const Tensors& t) {
                     const auto c = angles.cos().to(at::kDouble).unsqueeze(2);
                     const auto s = angles.sin().to(at::kDouble).unsqueeze(2);
                     const auto halves = t[0].chunk(2, -1);
                     return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1);
                   },
                   {random_tensor({3, 7, 2, width})});
    }
  }
}

TEST_P(ElementwiseKernels, CrossEntropyWorksForAnyNumberOfClasses) {
  for (const int64_t classes : {1, 16, 37, 300}) {
    const auto labels = at::arange(21, at::kLong).remainder(classes);
    expect_alike(
        [&](const Tensors& t) { return kernels::linear_cross_entropy(t[0], t[1], labels).to(t[0].scalar_type()); },
        [&](const Tensors& t) {
          return at::cross_entropy_loss(at::linear(t[0], t[1]), labels, {}, at::Reduction::Sum);
        },
        {random_tensor({21, 24}) * 2, random_tensor({classes, 24}, 1)},
        /*of_bf16=*/4e-2);  // tolerance of logits in bf16
  }
}

TEST_P(ElementwiseKernels, NanLogitsGiveANanLoss) {
  auto hidden = random_tensor({5, 16}).to(at::kFloat);
  hidden[2][3] = std::nan("");
  const auto loss =
      kernels::linear_cross_entropy(hidden, random_tensor({20, 16}, 1).to(at::kFloat), at::arange(5, at::kLong));
  EXPECT_TRUE(std::isnan(loss.item<float>()));
}

TEST_P(ElementwiseKernels, ProductsSupportTransposedOperands) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{16, 16}, {48, 160}, {1040, 32}}) {
    const auto x = random_tensor({rows, columns});
    const auto part = random_tensor({rows, columns + 16}, 1).narrow(1, 3, columns);  // row stride above `columns`
    for (const auto& each : {x, part}) {
      if (kernels::supports_elementwise_kernels(each)) {
        const auto turned = kernels::transpose_matrix(each);
        EXPECT_TRUE(turned.is_contiguous());
        EXPECT_TRUE(at::equal(turned, each.t()));
      }
      const auto other = random_tensor({rows, 48}, 2);
      const auto wanted = at::mm(each.t().to(at::kDouble), other.to(at::kDouble));
      EXPECT_LE((kernels::product_nt(each.t(), other.t()) - wanted).abs().max().item<double>(),
                1e-5 * wanted.abs().max().item<double>());
    }
  }
}

}  // namespace
}  // namespace tessera
