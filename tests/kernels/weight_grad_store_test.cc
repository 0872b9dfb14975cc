// Tests weight gradients that are computed after backward (kernels/autograd/weight_grad_store.h) against the gradients
// of a plain backward.
#include "tessera/kernels/autograd/weight_grad_store.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/linear/grouped_linear.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"

namespace tessera::kernels {
namespace {

struct Net {
  at::Tensor x, first, bias, second, head, labels;
  explicit Net(at::ScalarType dtype = at::kFloat) {
    at::manual_seed(3);
    const auto leaf = [&](std::vector<int64_t> sizes) { return at::randn(sizes).to(dtype).set_requires_grad(true); };
    x = leaf({3, 20, 24});
    first = leaf({32, 24});
    bias = leaf({32});
    second = leaf({24, 32});
    head = leaf({19, 24});
    labels = at::arange(60).remainder(19);
  }
  at::Tensor loss() const {
    const auto hidden = tessera::kernels::linear(at::gelu(tessera::kernels::linear(x, first, bias)), second);
    return kernels::linear_cross_entropy(hidden.reshape({-1, 24}), head, labels);
  }
  std::vector<at::Tensor> gradients() const {
    return {x.grad(), first.grad(), bias.grad(), second.grad(), head.grad()};
  }
};

void expect_same(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_TRUE(found[i].defined()) << i;
    EXPECT_TRUE(found[i].equal(wanted[i])) << i << ": " << (found[i] - wanted[i]).abs().max().item<double>();
  }
}

TEST(WeightGradStore, DeferredGradientsAreBitwiseEqual) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    Net whole(dtype), split(dtype);
    (whole.loss() / 7).backward();
    WeightGradStore later;
    {
      const WeightGradStore::Scope scope(&later);
      (split.loss() / 7).backward();
    }
    EXPECT_FALSE(later.empty());
    EXPECT_TRUE(split.x.grad().defined() && split.bias.grad().defined() && split.head.grad().defined());
    EXPECT_FALSE(split.first.grad().defined() || split.second.grad().defined());
    later.flush();
    EXPECT_TRUE(later.empty());
    expect_same(split.gradients(), whole.gradients());
  }
}

// The experts' products, of which one has no rows.
TEST(WeightGradStore, GradientsOfGroupedLinearAreDeferredToo) {
  at::manual_seed(3);
  const auto counts = at::tensor(std::vector<int64_t>{7, 0, 13});
  const auto drawn = at::randn({20, 8}), weight = at::randn({3, 6, 8}).set_requires_grad(true);
  const auto gradients = [&](WeightGradStore* later) {
    const auto x = drawn.clone().set_requires_grad(true);
    weight.mutable_grad().reset();
    {
      const WeightGradStore::Scope scope(later);
      kernels::grouped_linear(x, weight, counts).tanh().sum().backward();
    }
    EXPECT_EQ(weight.grad().defined(), later == nullptr);
    if (later != nullptr) later->flush();
    return std::vector<at::Tensor>{x.grad(), weight.grad().clone()};
  };
  WeightGradStore later;
  expect_same(gradients(&later), gradients(nullptr));
}

TEST(WeightGradStore, WeightThatIsUsedTwiceGetsBothGradients) {
  at::manual_seed(3);
  const auto x = at::randn({40, 16}), weight = at::randn({16, 16}).set_requires_grad(true);
  const auto input = x.clone().set_requires_grad(true);
  const auto run = [&] {
    return tessera::kernels::linear(tessera::kernels::linear(input, weight).tanh(), weight).sum();
  };
  run().backward();
  const auto wanted = weight.grad().clone();
  weight.mutable_grad().reset();
  WeightGradStore later;
  {
    const WeightGradStore::Scope scope(&later);
    run().backward();
  }
  later.flush();
  EXPECT_TRUE(at::allclose(weight.grad(), wanted, 1e-6, 1e-6));
}

TEST(WeightGradStore, HeadGradientIsAvailableAfterForward) {
  Net whole, sooner;
  (whole.loss() / 8).backward();
  WeightGradStore now;
  now.loss_factor = 1.0 / 8;
  now.stores_weight_gradients = false;
  at::Tensor loss;
  {
    const WeightGradStore::Scope scope(&now);
    loss = sooner.loss();
  }
  now.flush();
  EXPECT_TRUE(sooner.head.grad().equal(whole.head.grad()));
  EXPECT_FALSE(sooner.first.grad().defined());
  (loss / 8).backward();
  expect_same(sooner.gradients(), whole.gradients());
}

TEST(WeightGradStore, NothingIsDeferredOutsideItsScope) {
  WeightGradStore later;
  Net net;
  {
    const WeightGradStore::Scope scope(&later);
    const WeightGradStore::Scope none(nullptr);
    EXPECT_EQ(WeightGradStore::current(), nullptr);
    net.loss().backward();
  }
  EXPECT_TRUE(later.empty());
  EXPECT_TRUE(net.first.grad().defined());
}

}  // namespace
}  // namespace tessera::kernels
