// Tests derivatives on sharded operands against plain tensors. The formulas of these derivatives write to parts of
// their operands or flatten them.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/redistribute/redistribution_log.h"
#include "tests/dtensor/op_cases.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::random_tensor;
using ::testing::StartsWith;
using testing::Tensors;

at::Tensor leaf(const at::Tensor& whole, const MeshPtr& mesh, const Placement& placement) {
  return distribute_tensor(whole.detach().clone().requires_grad_(), mesh, {placement}, std::nullopt);
}

// Returns the gradients of `run` at these tensors, for the gradient `flow` of its result.
Tensors gradients_at(const std::function<at::Tensor(const Tensors&)>& run, const Tensors& at, const at::Tensor& flow) {
  run(at).backward(flow);
  Tensors gradients;
  for (const auto& tensor : at) gradients.push_back(tensor.grad());
  return gradients;
}

// Compares the gradients with the plain ones for all placements of the operands and of the incoming gradient.
void check_gradients(const std::function<at::Tensor(const Tensors&)>& run, const Tensors& whole) {
  Tensors plain;
  for (const auto& tensor : whole) plain.push_back(tensor.detach().clone().requires_grad_());
  const at::Tensor flow = random_tensor(run(plain).sizes().vec(), 7, false);
  const Tensors wanted = gradients_at(run, plain, flow);
  on_ranks(2, {2}, [&](const MeshPtr& mesh) {
    for (const auto& how : testing::placements_for(whole[0].sizes().vec(), true)) {
      for (const auto& flows : testing::placements_for(flow.sizes().vec(), true)) {
        Tensors spread;
        for (const auto& tensor : whole) {
          const bool cuts = how.is_shard() && how.dim >= tensor.dim();
          spread.push_back(leaf(tensor, mesh, cuts ? Placement(Replicate()) : how));
        }
        const Tensors found = gradients_at(run, spread, distribute_tensor(flow, mesh, {flows}, std::nullopt));
        for (size_t i = 0; i < wanted.size(); ++i) {
          EXPECT_TRUE(at::allclose(full_tensor(found[i]), wanted[i], 1e-9, 1e-9))
              << to_string(Placements{how}) << " flow " << to_string(Placements{flows}) << " gradient " << i;
        }
      }
    }
  });
}

TEST(DerivativeThatWrites, GradientsMatchPlainTensors) {
  const auto [reflectors, scales] = at::geqrf(random_tensor({3, 5, 4}, 1, false));
  check_gradients([](const Tensors& t) { return at::linalg_householder_product(t[0], t[1]); }, {reflectors, scales});
  const auto [square, taus] = at::geqrf(random_tensor({3, 3, 3}, 2, false) + 3 * at::eye(3, at::kDouble));
  check_gradients([](const Tensors& t) { return at::ormqr(t[0], t[1], t[2]); },
                  {square, taus, random_tensor({3, 3, 5}, 3, false)});
}

TEST(DerivativeThatWrites, GathersOnceForForwardAndBackward) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto [reflectors, scales] = at::geqrf(random_tensor({4, 5, 3}, 1, false));
    const at::Tensor input = leaf(reflectors, mesh, Shard(1));
    const at::Tensor tau = leaf(scales, mesh, Replicate());
    RedistributionLog log;
    const at::Tensor product = at::linalg_householder_product(input, tau);
    ASSERT_EQ(log.records().size(), 1U) << log.to_string();
    EXPECT_EQ(log.records()[0].cause, "aten::linalg_householder_product");
    EXPECT_FALSE(log.records()[0].is_explicit);
    const CommDebugMode comm;
    product.sum().backward();
    EXPECT_EQ(comm.total(), 0);
    EXPECT_EQ(placements(input.grad()), Placements{Shard(1)});
  });
}

TEST(DerivativeThatFlattens, GathersUnevenShards) {
  const auto [pooled, places] = at::max_pool2d_with_indices(random_tensor({3, 2, 6, 6}, 1, false), {2, 2});
  const at::Tensor indices = places;
  check_gradients(
      [&](const Tensors& t) {
        const bool spread = is_dtensor(t[0]);
        const at::Tensor at =
            spread ? distribute_tensor(indices, device_mesh(t[0]), {Shard(3)}, std::nullopt) : indices;
        return at::max_unpool2d(t[0], at, {7, 6});
      },
      {pooled});
}

TEST(DerivativeThatFlattens, SecondDerivativesMatchPlainTensors) {
  const at::Tensor image = random_tensor({2, 4, 5, 3}, 1, false);
  const auto second = [](const at::Tensor& x) {
    const at::Tensor y = std::get<0>(at::native_group_norm(x, {}, {}, 2, 4, 15, 2, 1e-5));
    const at::Tensor first = torch::autograd::grad({(y * y * y).sum()}, {x}, {}, true, true)[0];
    (first * first).sum().backward();
    return x.grad();
  };
  const at::Tensor wanted = second(image.clone().requires_grad_());
  on_ranks(2, {2}, [&](const MeshPtr& mesh) {
    for (const auto& how : testing::placements_for({2, 4, 5, 3}, false)) {
      EXPECT_TRUE(at::allclose(full_tensor(second(leaf(image, mesh, how))), wanted, 1e-8, 1e-8))
          << to_string(Placements{how});
    }
  });
}

TEST(DerivativeThatFlattens, OnlyBackwardGathersAndWritesToTheCopyAreRefused) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = leaf(random_tensor({3, 2}, 1, false), mesh, Shard(0));
    EXPECT_THAT(error_of([&] { x.view({6}); }),
                AllOf(StartsWith("Sharding dimension mismatch"), HasSubstr("Cannot flatten unevenly sharded tensor")));
    std::string of_write;
    at::Tensor flat;
    x.register_hook([&](const at::Tensor& gradient) {
      flat = gradient.view({6});
      of_write = error_of([&] { flat.add_(1); });
    });
    (x * x).sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(flat), 2 * random_tensor({3, 2}, 1, false).view({6})));
    EXPECT_THAT(of_write, AllOf(StartsWith("Sharding dimension mismatch"), HasSubstr("would be lost")));
    EXPECT_THAT(error_of([&] { x.view({6}); }), StartsWith("Sharding dimension mismatch"));  // no plan kept
  });
}

}  // namespace
}  // namespace tessera
