// Tests factors of products that backward recomputes. Their gradients must equal the gradients of kept factors to the
// bit, and no memory may be kept between forward and backward.
#include "tessera/kernels/autograd/recomputed_activation.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/kernels/rows/rms_norm.h"
#include "tests/kernels/gradients.h"

namespace tessera {
namespace {

using testing::random_tensor;
using Tensors = std::vector<at::Tensor>;

// A norm, two products, a gate and a product, as in a layer. With `kept` the factors are copies, which are not
// recomputed.
struct Layer {
  Tensors leaves;  // x, norm, two up weights, one down weight
  at::Tensor normed, gated, y;

  explicit Layer(bool kept, bool frozen = false) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{40, 32}, {32}, {48, 32}, {48, 32}, {32, 48}}) {
      leaves.push_back(random_tensor(shape, static_cast<int>(leaves.size())).requires_grad_(true));
    }
    if (frozen) leaves[3].requires_grad_(false);
    normed = kernels::rms_norm(leaves[0], leaves[1], 1e-5, false);
    if (kept) normed = normed.clone();
    gated = kernels::swiglu(tessera::kernels::linear(normed, leaves[2]), tessera::kernels::linear(normed, leaves[3]));
    if (kept) gated = gated.clone();
    y = tessera::kernels::linear(gated, leaves[4]);
  }
  Tensors gradients(bool retain = false, bool differentiable = false) const {
    Tensors wanted;
    for (const auto& leaf : leaves) {
      if (leaf.requires_grad()) wanted.push_back(leaf);
    }
    return torch::autograd::grad({y}, wanted, {random_tensor({40, 32}, 9)}, retain, differentiable);
  }
};

void expect_equal(const Tensors& got, const Tensors& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << "gradient " << i;
}

TEST(RecomputedActivation, FactorsAreNotSavedAndGiveTheSameGradients) {
  for (const bool frozen : {false, true}) {
    const Layer layer(/*kept=*/false, frozen), usual(/*kept=*/true, frozen);
    EXPECT_EQ(layer.normed.use_count(), 1U) << "nobody else has it";
    EXPECT_EQ(layer.gated.use_count(), 1U);
    EXPECT_GT(usual.gated.use_count(), 1U);
    EXPECT_TRUE(at::equal(layer.y, usual.y));
    expect_equal(layer.gradients(), usual.gradients());
  }
}

TEST(RecomputedActivation, SecondBackwardOfTheSameGraphGivesTheSameGradients) {
  const Layer layer(/*kept=*/false);
  const auto first = layer.gradients(/*retain=*/true);
  expect_equal(layer.gradients(), first);
}

TEST(RecomputedActivation, SecondDerivativesAreCorrect) {
  const Layer layer(/*kept=*/false), usual(/*kept=*/true);
  const auto second = [](const Layer& of) {
    const auto first = of.gradients(/*retain=*/true, /*differentiable=*/true);
    at::Tensor sum = first[0].square().sum();
    for (size_t i = 1; i < first.size(); ++i) sum = sum + first[i].square().sum();
    return torch::autograd::grad({sum}, of.leaves);
  };
  const auto got = second(layer), wanted = second(usual);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE((got[i] - wanted[i]).abs().max().item<double>(), 1e-5 * wanted[i].abs().max().item<double>()) << i;
  }
}

TEST(RecomputedActivation, OtherResultsAreSaved) {
  const auto x = random_tensor({20, 16}).requires_grad_(true);
  EXPECT_EQ(kernels::recomputed_activation(x, x), nullptr);
  EXPECT_EQ(kernels::recomputed_activation(x * 2, x), nullptr);
  EXPECT_EQ(kernels::recomputed_activation(kernels::swiglu(x, x).mul_(2), x), nullptr) << "changed since";
  EXPECT_NE(kernels::recomputed_activation(kernels::geglu(x, x), x), nullptr);
  // fully_shard may free a norm's weight before backward. The norm can then be recomputed only if the weight of the
  // product is freed together with the norm's weight.
  const auto memory = random_tensor({32});
  const auto parts = at::from_blob(memory.mutable_data_ptr(), {32});
  const auto norm = parts.narrow(0, 0, 16).requires_grad_(true), beside = parts.narrow(0, 16, 16);
  EXPECT_EQ(kernels::recomputed_activation(kernels::rms_norm(x, norm, 1e-5, false), x), nullptr);
  EXPECT_NE(kernels::recomputed_activation(kernels::rms_norm(x, norm, 1e-5, false), beside), nullptr);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(kernels::recomputed_activation(kernels::swiglu(x, x), x), nullptr);
}

}  // namespace
}  // namespace tessera
