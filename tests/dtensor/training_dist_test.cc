// Tests DTensors in training against plain tensors: autograd, optimizers, hooks and other operations of a training
// step.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/rule.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

at::Tensor values(at::IntArrayRef sizes, double step = 0.1) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).mul(step).sin().view(sizes);
}

// A Llama block: norm, attention with rotary positions, gated MLP. Its parameters are sharded for tensor parallelism.
struct Block {
  at::Tensor norm, q, k, v, o, gate, up, down, cos, sin;

  at::Tensor rotate(const at::Tensor& x) const {
    const int64_t half = x.size(-1) / 2;
    return x * cos + at::cat({-x.slice(-1, half), x.slice(-1, 0, half)}, -1) * sin;
  }

  at::Tensor forward(const at::Tensor& x) const {
    const int64_t batch = x.size(0);
    const int64_t length = x.size(1);
    const auto heads = [&](const at::Tensor& t) { return t.view({batch, length, 4, -1}).transpose(1, 2); };
    const at::Tensor h = at::rms_norm(x, {x.size(2)}, norm, 1e-6);
    const at::Tensor a = at::scaled_dot_product_attention(
        rotate(heads(at::linear(h, q))), rotate(heads(at::linear(h, k))), heads(at::linear(h, v)), {}, 0.0, true);
    const at::Tensor mid = x + at::linear(a.transpose(1, 2).reshape({batch, length, -1}), o);
    const at::Tensor n = at::rms_norm(mid, {mid.size(2)}, norm, 1e-6);
    return mid + at::linear(at::silu(at::linear(n, gate)) * at::linear(n, up), down);
  }

  std::vector<at::Tensor*> parameters() { return {&norm, &q, &k, &v, &o, &gate, &up, &down}; }
};

Block plain_block() {
  Block block;
  block.norm = values({8}).add(1);
  for (auto* weight : {&block.q, &block.k, &block.v, &block.o}) *weight = values({8, 8}, 0.3);
  block.gate = values({12, 8}, 0.7);
  block.up = values({12, 8}, 0.9);
  block.down = values({8, 12}, 1.1);
  block.cos = values({1, 1, 6, 2}, 0.2);
  block.sin = values({1, 1, 6, 2}, 0.4);
  return block;
}

TEST(Training, TensorParallelTransformerBlockEqualsOneDevice) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    Block plain = plain_block();
    Block cut = plain_block();
    const std::vector<Placement> tp = {Replicate(), Shard(0), Shard(0), Shard(0),
                                       Shard(1),    Shard(0), Shard(0), Shard(1)};
    const auto parameters = cut.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      plain.parameters()[i]->set_requires_grad(true);
      *parameters[i] =
          distribute_tensor(parameters[i]->set_requires_grad(true), mesh, {Replicate(), tp[i]}, std::nullopt);
    }
    cut.cos = distribute_tensor(cut.cos, mesh, {Replicate(), Replicate()}, std::nullopt);
    cut.sin = distribute_tensor(cut.sin, mesh, {Replicate(), Replicate()}, std::nullopt);
    const at::Tensor x = values({4, 6, 8}, 0.5);
    const at::Tensor target = at::arange(24) % 8;
    const at::Tensor wanted = at::cross_entropy_loss(plain.forward(x).view({24, 8}), target);
    wanted.backward();
    const at::Tensor y = cut.forward(distribute_tensor(x, mesh, {Shard(0), Replicate()}, std::nullopt));
    const at::Tensor loss =
        at::cross_entropy_loss(y.view({24, 8}), distribute_tensor(target, mesh, {Shard(0), Replicate()}, std::nullopt));
    EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), 1e-9);
    loss.backward();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(at::allclose(full_tensor(parameters[i]->grad()), plain.parameters()[i]->grad(), 1e-7, 1e-9)) << i;
    }
  });
}

// Parameters with several placements, and replicated gradients.
struct Stepped {
  std::vector<at::Tensor> plain, cut, plain_gradients, cut_gradients;
  explicit Stepped(const MeshPtr& mesh) {
    for (const auto& placement : {Shard(0), Shard(1), Replicate()}) {
      for (const int64_t rows : {1, 3, 8}) {
        plain.push_back(values({rows, 4}).to(at::kFloat));
        plain_gradients.push_back(values({rows, 4}, 0.7).to(at::kFloat));
        cut.push_back(distribute_tensor(plain.back(), mesh, {placement}, std::nullopt));
        cut_gradients.push_back(distribute_tensor(plain_gradients.back(), mesh, {Replicate()}, std::nullopt));
      }
    }
  }
  void expect_equal() const {
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::allclose(full_tensor(cut[i]), plain[i], 1e-5, 1e-6)) << i << str(cut[i]) << plain[i];
    }
  }
};

TEST(Optimizer, ForeachAdamWStepEqualsThePlainOne) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    Stepped step(mesh);
    const auto adamw = [](std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients) {
      std::vector<at::Tensor> first;
      std::vector<at::Tensor> second;
      for (const auto& parameter : parameters) {
        first.push_back(at::zeros_like(parameter));
        second.push_back(at::zeros_like(parameter));
      }
      for (int i = 0; i < 2; ++i) {
        at::_foreach_mul_(parameters, 0.99);
        at::_foreach_lerp_(first, gradients, 0.1);
        at::_foreach_mul_(second, 0.95);
        at::_foreach_addcmul_(second, gradients, gradients, 0.05);
        auto root = at::_foreach_sqrt(second);
        at::_foreach_div_(root, 0.3);
        at::_foreach_add_(root, 1e-8);
        at::_foreach_addcdiv_(parameters, first, root, -0.01);
      }
    };
    adamw(step.plain, step.plain_gradients);
    adamw(step.cut, step.cut_gradients);
    step.expect_equal();
  });
}

TEST(Optimizer, FusedStepsEqualThePlainOnes) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    Stepped step(mesh);
    const auto run = [](std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& gradients) {
      std::vector<at::Tensor> first;
      std::vector<at::Tensor> second;
      std::vector<at::Tensor> momentum;
      std::vector<at::Tensor> steps;
      for (const auto& parameter : parameters) {
        first.push_back(at::zeros_like(parameter));
        second.push_back(at::zeros_like(parameter));
        momentum.push_back(at::zeros_like(parameter));
        steps.push_back(at::ones({}));
      }
      at::_fused_adamw_(parameters, gradients, first, second, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
      at::_fused_sgd_(parameters, gradients, momentum, 0.01, 0.9, 0.1, 0.0, false, false, true);
    };
    run(step.plain, step.plain_gradients);
    run(step.cut, step.cut_gradients);
    step.expect_equal();
  });
}

TEST(Optimizer, ForeachNormStaysPartialUntilCombined) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    Stepped step(mesh);
    CommDebugMode count;
    const auto norms = at::_foreach_norm(step.cut, 2);
    EXPECT_EQ(count.total(), 0);
    const std::vector<at::Tensor> sharded(norms.begin(), norms.begin() + 6);
    const auto total = at::linalg_vector_norm(at::stack(sharded), 2);
    EXPECT_EQ(count.total(), 0);
    const std::vector<at::Tensor> plain(step.plain.begin(), step.plain.begin() + 6);
    EXPECT_NEAR(total.item<float>(), at::linalg_vector_norm(at::stack(at::_foreach_norm(plain, 2)), 2).item<float>(),
                1e-5);
    EXPECT_EQ(count.all_reduces(), 1);
  });
}

TEST(Autograd, GradientsAccumulateAndUndefinedOnesAreZeros) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    auto w = distribute_tensor(at::ones({4, 4}).set_requires_grad(true), mesh, {Shard(0)}, std::nullopt);
    const auto x = distribute_tensor(at::ones({3, 4}), mesh, {Replicate()}, std::nullopt);
    for (int i = 0; i < 2; ++i) at::mm(x, w.t()).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({4, 4}, 6.0)));
    // Only one of the results of a split gets a gradient.
    w.mutable_grad() = at::Tensor();
    const auto parts = w.split(2, 1);
    (parts[0] * 2).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::cat({at::full({4, 2}, 2.0), at::zeros({4, 2})}, 1)));
    auto v = distribute_tensor(at::ones({2, 4}), mesh, {Shard(1)}, std::nullopt).set_requires_grad(true);
    const auto rows = at::unbind(v, 0);
    rows[1].sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(v.grad()), at::cat({at::zeros({1, 4}), at::ones({1, 4})}, 0)));
  });
}

TEST(Tensor, DetachSetDataAndInferenceModeWork) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto a = distribute_tensor(at::ones({4}).set_requires_grad(true), mesh, {Shard(0)}, std::nullopt);
    const auto b = distribute_tensor(at::full({4}, 2.0), mesh, {Replicate()}, std::nullopt);
    const auto d = a.detach();
    EXPECT_FALSE(d.requires_grad());
    EXPECT_EQ(placements(d)[0], Shard(0));
    EXPECT_TRUE(to_local(d).is_alias_of(to_local(a.detach())));
    EXPECT_THROW((void)a.is_alias_of(b), c10::Error);  // a DTensor has no storage to compare
    a.set_data(b);
    EXPECT_EQ(placements(a)[0], Replicate());
    EXPECT_TRUE(at::equal(full_tensor(a.detach()), at::full({4}, 2.0)));
    EXPECT_THAT(error_of([&] { str(at::ones({2})); }), HasSubstr("wanted a DTensor"));
    EXPECT_THAT(str(b), HasSubstr("placements=(R), mesh=DeviceMesh((2), 'cpu')"));
    c10::InferenceMode inference;
    EXPECT_TRUE(at::equal(full_tensor(b * 2), at::full({4}, 4.0)));
  });
}

TEST(RegisterRule, AddsAnOperationOfAnotherLibrary) {
  static const auto library = [] {
    auto made =
        std::make_unique<torch::Library>(torch::Library::FRAGMENT, "tessera_test", std::nullopt, __FILE__, __LINE__);
    made->def("scale(Tensor x, Tensor gain) -> Tensor");
    made->impl("scale", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                        [](const at::Tensor& x, const at::Tensor& gain) { return x * gain; }));
    return made;
  }();
  (void)library;
  const auto scale = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("tessera_test::scale", "")
                         .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  register_rule("tessera_test::scale", [](const OpCall& call, Proposal& proposal) {
    proposal.strategies.push_back({.outputs = {Shard(0)}, .inputs = {Shard(0), Replicate()}});
    proposal.output(call.inputs[0].sizes);
  });
  on_ranks(2, {2}, [&](const MeshPtr& mesh) {
    at::NoGradGuard no_grad;
    const auto x = distribute_tensor(values({3, 4}), mesh, {Shard(0)}, std::nullopt);
    const auto gain = distribute_tensor(values({4}), mesh, {Shard(0)}, std::nullopt);
    const auto y = scale.call(x, gain);
    EXPECT_EQ(placements(y)[0], Shard(0));
    EXPECT_TRUE(at::allclose(full_tensor(y), values({3, 4}) * values({4})));
  });
}

}  // namespace
}  // namespace tessera
