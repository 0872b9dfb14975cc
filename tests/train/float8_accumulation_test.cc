// Tests that float8 weights are converted once per step for all its micro-batches. The accumulation flags announce the
// first micro-batch.
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "tessera/nn/linear/float8.h"
#include "tessera/train/nemo/accumulation.h"

namespace tessera::train {
namespace {

struct OneMlp : nn::Callable<OneMlp> {
  std::shared_ptr<nn::MLP> mlp;
  OneMlp() {
    register_module("mlp", mlp, std::make_shared<nn::MLP>(16, 24, nn::MLPOptions{}, nn::ParameterOptions{}));
    const at::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) parameter.uniform_(-0.5, 0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return (*mlp)(x); }
};

TEST(Float8Accumulation, ConvertsEachWeightOncePerStep) {
  OneMlp model;
  const auto steps = nn::convert_to_float8(model);
  MicrobatchFlags flags;
  flags.on_change([steps](const MicrobatchFlags& now) {
    if (now.first_microbatch() == true && !now.optim_step()) steps->begin_float8_step();
  });
  const auto x = at::randn({3, 16});
  for (int64_t step = 1; step <= 3; ++step) {
    prepare_for_grad_accumulation(flags, {&model});
    for (int64_t batch = 0; batch < 4; ++batch) {
      if (batch == 3) prepare_for_final_backward(flags, {&model});
      model(x).sum().backward();
      if (batch == 0) prepare_after_first_microbatch(flags);
    }
    EXPECT_EQ(steps->weight_conversions, 3 * step);
  }
}

}  // namespace
}  // namespace tessera::train
