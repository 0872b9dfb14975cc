// Test of ScopedModuleOffloading on a GPU: the model moves to the GPU and back, and its tensor handles stay valid.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/train/nemo/module_offloading.h"

namespace tessera::train {
namespace {

struct Scaled : nn::Callable<Scaled> {
  at::Tensor weight, scale;
  Scaled() {
    register_parameter("weight", weight, at::arange(32, at::kFloat).view({4, 8}));
    register_buffer("scale", scale, at::full({3}, 2.0));
    weight.set_requires_grad(true);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight) * scale[0]; }
};

TEST(ModuleOffloadingCuda, MovesToTheGpuAndBackAndKeepsHandles) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  Scaled model;
  const auto weight = model.weight, scale = model.scale;
  const auto wanted = weight.detach().clone();
  EXPECT_THROW(
      {
        ScopedModuleOffloading here(model, true);
        EXPECT_TRUE(weight.is_cuda() && scale.is_cuda());
        model(at::ones({2, 8}, at::device(at::kCUDA))).sum().backward();
        EXPECT_TRUE(weight.grad().is_cuda());
        throw std::runtime_error("of the body");
      },
      std::runtime_error);
  EXPECT_TRUE(weight.is_cpu() && scale.is_cpu() && weight.grad().is_cpu());
  EXPECT_TRUE(model.weight.is_same(weight) && weight.equal(wanted));
  EXPECT_TRUE(weight.grad().equal(at::full({4, 8}, 4.0)));
}

}  // namespace
}  // namespace tessera::train
