// Tests writes to views against plain tensors: under autograd, through chains of views, and next to views that are
// copies.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::on_ranks;

at::Tensor sevenths(std::vector<int64_t> sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).view(sizes) / 7 - 1;
}

using Program = std::function<at::Tensor(const at::Tensor& w)>;

// Programs that write through views of dims 1 and 2 of w * 1 ([4, 3, 6]).
std::vector<std::pair<std::string, Program>> writes_to_views() {
  return {
      {"select",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.select(1, 0).mul_(2);
         return h;
       }},
      {"narrow",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.narrow(2, 1, 3).copy_(w.narrow(2, 0, 3).sin());
         return h;
       }},
      {"step",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.slice(2, 0, 6, 2).add_(w.slice(2, 1, 6, 2));
         return h;
       }},
      {"transpose of select",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.transpose(1, 2).select(2, 1).mul_(w.select(1, 2));
         return h;
       }},
      {"permute",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.permute({2, 0, 1}).exp_();
         return h;
       }},
      {"unsqueeze",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.unsqueeze(2).mul_(3).squeeze(2).add_(1);
         return h;
       }},
      {"diagonal",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.diagonal(0, 1, 2).mul_(w.diagonal(1, 1, 2));
         return h;
       }},
      {"the view goes on",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         const at::Tensor v = h.select(1, 0);
         v.mul_(2);
         return h + v.unsqueeze(1);
       }},
      {"the base goes on",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         const at::Tensor v = h.select(1, 0);
         h.mul_(w);
         return h * v.unsqueeze(1);
       }},
      {"twice",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         h.select(1, 0).mul_(w.select(1, 1));
         h.narrow(2, 0, 2).mul_(w.narrow(2, 2, 2));
         return h;
       }},
      {"the base was transposed in place",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         const at::Tensor v = h.select(1, 0);
         h.transpose_(1, 2);
         h.unsqueeze_(0);
         v.mul_(w.select(1, 1));
         h.squeeze_(0);
         v.add_(1);
         h.transpose_(1, 2);
         return h;
       }},
      {"the view was transposed in place",
       [](const at::Tensor& w) {
         const at::Tensor h = w * 1;
         const at::Tensor v = h.narrow(2, 1, 3);
         v.transpose_(1, 2);
         v.mul_(w.narrow(2, 0, 3).transpose(1, 2));
         v.unsqueeze_(0);
         v.squeeze_();
         v.exp_();
         return h;
       }},
  };
}

at::Tensor loss_of(const at::Tensor& result, const at::Tensor& weights) { return (result * result * weights).sum(); }

TEST(ViewWrite, GradientsMatchPlainTensors) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor weights = sevenths({6}).cos();
    for (const auto& [name, program] : writes_to_views()) {
      const at::Tensor plain = sevenths({4, 3, 6}).requires_grad_(true);
      loss_of(program(plain), weights).backward();
      for (const Placement& lie : {Shard(0), Replicate()}) {
        const at::Tensor w = distribute_tensor(plain.detach(), mesh, {lie}).requires_grad_(true);
        const at::Tensor spread = distribute_tensor(weights, mesh, {Shard(0)});  // other than the gradient
        loss_of(program(w), spread).backward();
        EXPECT_TRUE(full_tensor(w.grad()).allclose(plain.grad(), 1e-9)) << name << " " << to_string(lie);
      }
    }
  });
}

TEST(ViewWrite, SecondDerivativesMatchPlainTensors) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto twice = [](const Program& program, const at::Tensor& w) {
      const at::Tensor first =
          torch::autograd::grad({program(w).pow(3).sum()}, {w}, {}, std::nullopt, /*create_graph=*/true)[0];
      return torch::autograd::grad({first.pow(2).sum()}, {w})[0];
    };
    for (const auto& [name, program] : writes_to_views()) {
      const at::Tensor plain = sevenths({4, 3, 6}).requires_grad_(true);
      const at::Tensor w = distribute_tensor(plain.detach(), mesh, {Shard(0)}).requires_grad_(true);
      EXPECT_TRUE(full_tensor(twice(program, w)).allclose(twice(program, plain), 1e-9)) << name;
    }
  });
}

TEST(ViewWrite, GradientOfTheBaseStaysShardedWhenTheViewAllowsIt) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor w = distribute_tensor(sevenths({4, 6}), mesh, {Shard(0)}).requires_grad_(true);
    const at::Tensor h = w * 1;
    h.select(1, 0).mul_(2);
    const at::Tensor loss = (h * h).sum();
    CommDebugMode moved;
    loss.backward();
    EXPECT_EQ(moved.total_bytes(), 0);
    EXPECT_EQ(placements(w.grad())[0], Shard(0));
  });
}

TEST(ViewWrite, PlainTensorsAreUnaffected) {
  const at::Tensor w = sevenths({4, 6}).requires_grad_(true);
  const at::Tensor h = w * 1;
  h.select(1, 0).mul_(2);
  h.sum().backward();
  EXPECT_EQ(w.grad().select(1, 0).sum().item<double>(), 8);
}

}  // namespace
}  // namespace tessera
