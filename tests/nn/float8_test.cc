// Tests the float8 linear on the CPU: when weights are converted, which names and gradients the model keeps, and
// extreme values.
#include "tessera/nn/linear/float8.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace tessera::nn {
namespace {

using kernels::to_float8;

struct TwoProducts : Callable<TwoProducts> {
  std::shared_ptr<MLP> mlp;
  TwoProducts() {
    register_module("mlp", mlp, std::make_shared<MLP>(16, 24, MLPOptions{}, ParameterOptions{}));
    const at::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) parameter.uniform_(-0.5, 0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return (*mlp)(x); }
};

TEST(Float8, ConvertsEachWeightOnceAStep) {
  TwoProducts model;
  const auto steps = convert_to_float8(model);
  const auto x = at::randn({3, 16});
  const auto micro_batch = [&] { model(x).sum().backward(); };
  micro_batch();
  micro_batch();
  EXPECT_EQ(steps->weight_conversions, 6) << "nobody said that a step began: each use";
  for (int64_t step = 1; step <= 2; ++step) {
    steps->begin_float8_step();
    for (int64_t batch = 0; batch < 4; ++batch) micro_batch();
    EXPECT_EQ(steps->weight_conversions, 6 + 3 * step);
  }
  model.train(false);
  model(x);
  model(x);
  EXPECT_EQ(steps->weight_conversions, 12 + 6) << "outside training the parameters may have changed";
}

TEST(Float8, UsesNewWeightsFromTheNextStepAndKeepsNamesAndGradients) {
  TwoProducts model, plain;
  const auto names = [](Module& of) {
    std::string all;
    for (const auto& named : of.named_parameters()) all += named.name + " ";
    return all;
  };
  const auto before = names(model);
  const auto steps = convert_to_float8(model);
  EXPECT_EQ(names(model), before);
  const auto x = at::randn({3, 16});
  steps->begin_float8_step();
  const auto first = model(x);
  first.sum().backward();
  for (const auto& parameter : model.parameters()) {
    ASSERT_TRUE(parameter.grad().defined());
    const at::NoGradGuard no_grad;
    parameter.mul_(2);
  }
  EXPECT_TRUE(model(x).equal(first)) << "the same step";
  steps->begin_float8_step();
  EXPECT_FALSE(model(x).allclose(first, 0.1, 0.1));
}

TEST(Float8, KeepsZerosAndTheLargestValue) {
  const auto zeros = to_float8(at::zeros({3}), at::kFloat8_e4m3fn);
  EXPECT_TRUE(zeros.value().equal(at::zeros({3})));
  const auto some = to_float8(at::tensor({-7.0F, 1.0F}), at::kFloat8_e4m3fn);
  EXPECT_EQ(some.data.to(at::kFloat)[0].item<float>(), -448);
  EXPECT_FLOAT_EQ(some.value()[0].item<float>(), -7);
  EXPECT_EQ(to_float8(at::zeros({0, 4}), at::kFloat8_e5m2).data.numel(), 0);
}

}  // namespace
}  // namespace tessera::nn
