// Tests nn::Module: children that are replaced or removed, and hooks around forward.
#include "tessera/nn/module.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {
namespace {

// Like an adapter, this layer replaces a Linear and computes more.
struct Doubled : Linear {
  std::shared_ptr<Linear> inside;
  explicit Doubled(std::shared_ptr<Linear> of) : Linear(1, 1, false, {}) { register_module("inside", inside, of); }
  at::Tensor forward(const at::Tensor& x) override { return (*inside)(x)*2; }
};

std::shared_ptr<MLP> make_mlp() {
  auto mlp = std::make_shared<MLP>(4, 6, MLPOptions{}, ParameterOptions{});
  at::NoGradGuard no_grad;
  for (const auto& parameter : mlp->parameters()) parameter.normal_();
  return mlp;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    return error.what();
  }
  return "";
}

TEST(Module, ReplacedChildIsCalled) {
  at::NoGradGuard no_grad;
  auto mlp = make_mlp();
  const auto x = at::randn({3, 4}), before = (*mlp)(x);
  mlp->replace_child("down_proj", std::make_shared<Doubled>(mlp->down_proj));
  EXPECT_TRUE(at::allclose((*mlp)(x), before * 2));
  std::vector<std::string> names;
  for (const auto& named : mlp->named_parameters()) names.push_back(named.name);
  EXPECT_EQ(names, (std::vector<std::string>{"gate_proj.weight", "up_proj.weight", "down_proj.weight",
                                             "down_proj.inside.weight"}));
}

TEST(Module, ReplacingAChildByNullRemovesIt) {
  auto mlp = make_mlp();
  mlp->replace_child("down_proj", nullptr);
  EXPECT_EQ(mlp->down_proj, nullptr);
  EXPECT_EQ(mlp->named_children().size(), 2U);
  EXPECT_EQ(mlp->parameters().size(), 2U);
}

TEST(Module, InvalidReplacementIsAnErrorAndChangesNothing) {
  auto mlp = make_mlp();
  const auto down = mlp->down_proj;
  const auto norm = std::make_shared<RMSNorm>(4, NormOptions{}, ParameterOptions{});
  EXPECT_NE(error_of([&] { mlp->replace_child("down_proj", norm); }).find("another type"), std::string::npos);
  EXPECT_NE(error_of([&] { mlp->replace_child("middle", down); }).find("no child 'middle'"), std::string::npos);
  EXPECT_EQ(mlp->down_proj, down);
  EXPECT_EQ(mlp->named_children().back().second, down);
}

TEST(Module, ForwardHooksGetTheInputsThatForwardGot) {
  at::NoGradGuard no_grad;
  auto mlp = make_mlp();
  const auto x = at::randn({3, 4}), other = at::randn({3, 4}), wanted = (*mlp)(other);
  mlp->register_forward_pre_hook([&](Module&, TensorRefs& inputs) { *inputs[0] = other; });
  int calls = 0;
  mlp->register_forward_hook([&](Module& module, const TensorRefs& inputs, TensorRefs& outputs) {
    EXPECT_EQ(&module, mlp.get());
    ASSERT_EQ(inputs.size(), 1U);
    EXPECT_TRUE(inputs[0]->is_same(other));
    *outputs[0] = *outputs[0] + *inputs[0];
    ++calls;
  });
  mlp->register_forward_hook([&](Module&, TensorRefs& outputs) { calls += static_cast<int>(outputs.size()); });
  EXPECT_TRUE(at::allclose((*mlp)(x), wanted + other));
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace tessera::nn
