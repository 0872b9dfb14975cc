// Tests that DTensors with unevenly sharded dims run the operations of plain tensors. Only two calls are refused: a
// view that must alias and cannot, and a write that would be lost.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using ::testing::StartsWith;

at::Tensor waves(std::vector<int64_t> sizes) {
  return (at::arange(c10::multiply_integers(sizes), at::kDouble) * 0.37).sin().view(sizes);
}

using Function = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& w)>;

struct Case {
  const char* name;
  std::vector<int64_t> x, w;
  Function run;
};

std::vector<Case> cases() {
  const auto linear = [](const at::Tensor& x, const at::Tensor& w) { return at::linear(x, w); };
  const auto biased = [](const at::Tensor& x, const at::Tensor& w) { return at::linear(x, w, w.select(1, 0)); };
  const auto matmul = [](const at::Tensor& x, const at::Tensor& w) { return at::matmul(x, w); };
  return {
      {"linear", {3, 5, 4}, {6, 4}, linear},
      {"linear with bias", {3, 5, 4}, {6, 4}, biased},
      {"linear of four dims", {3, 2, 5, 4}, {6, 4}, biased},
      {"matmul", {3, 5, 4}, {4, 6}, matmul},
      {"matmul with a vector", {3, 5, 4}, {4}, matmul},
      {"matmul of batches", {3, 3, 5, 4}, {3, 3, 4, 2}, matmul},
      {"matmul of broadcast batches", {3, 3, 5, 4}, {3, 4, 2}, matmul},
      {"matmul of a matrix with batches", {5, 4}, {3, 4, 2}, matmul},
      {"reshape",
       {3, 5, 4},
       {1},
       [](const at::Tensor& x, const at::Tensor&) {
         return x.reshape({15, 4}) * 2;
       }},
      {"flatten", {5, 3}, {1}, [](const at::Tensor& x, const at::Tensor&) { return x.flatten() * 2; }},
      {"reshape of what is permuted",
       {3, 5, 4},
       {1},
       [](const at::Tensor& x, const at::Tensor&) {
         return x.permute({1, 0, 2}).reshape({5, 12}) * 2;
       }},
      {"unflatten by reshape",
       {6, 4},
       {1},
       [](const at::Tensor& x, const at::Tensor&) {
         return x.reshape({2, 3, 4}) * 2;
       }},
      {"squeeze", {1, 5}, {1}, [](const at::Tensor& x, const at::Tensor&) { return x.squeeze(0) * 2; }},
      {"unbind",
       {3, 5},
       {1},
       [](const at::Tensor& x, const at::Tensor&) { return x.unbind(0)[2] * x.unbind(1)[1].sum(); }},
  };
}

std::vector<Placements> all_placements(int64_t mesh_dims, int64_t dims) {
  std::vector<Placements> all{{}};
  for (int64_t m = 0; m < mesh_dims; ++m) {
    std::vector<Placements> longer;
    for (const auto& some : all) {
      for (int64_t d = -1; d < dims; ++d) {
        longer.push_back(some);
        longer.back().push_back(d < 0 ? Replicate() : Shard(d));
      }
    }
    all = std::move(longer);
  }
  return all;
}

void check(const Case& c, const MeshPtr& mesh) {
  const auto leaf = [](const at::Tensor& t) { return t.detach().clone().requires_grad_(true); };
  const at::Tensor x = leaf(waves(c.x));
  const at::Tensor w = leaf(waves(c.w));
  const at::Tensor wanted = c.run(x, w);
  wanted.pow(2).sum().backward();
  for (const auto& lie : all_placements(mesh->ndim(), static_cast<int64_t>(c.x.size()))) {
    const at::Tensor dx = distribute_tensor(x.detach(), mesh, lie).requires_grad_(true);
    const at::Tensor dw = distribute_tensor(w.detach(), mesh, Placements(lie.size(), Replicate())).requires_grad_(true);
    const at::Tensor found = c.run(dx, dw);
    EXPECT_TRUE(full_tensor(found).allclose(wanted, 1e-9)) << c.name << " " << to_string(lie);
    found.pow(2).sum().backward();
    EXPECT_TRUE(full_tensor(dx.grad()).allclose(x.grad(), 1e-9)) << c.name << " " << to_string(lie);
    if (w.grad().defined()) {
      EXPECT_TRUE(full_tensor(dw.grad()).allclose(w.grad(), 1e-9)) << c.name << " " << to_string(lie);
    }
  }
}

TEST(Uneven, ValuesAndGradientsOnOneMeshDim) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    for (const auto& c : cases()) check(c, mesh);
  });
}

TEST(Uneven, ValuesAndGradientsOnTwoMeshDims) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    for (const auto& c : cases()) check(c, mesh);
  });
}

TEST(Uneven, LinearKeepsThePlacementOfActivations) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor w = distribute_tensor(waves({6, 4}), mesh, {Replicate()});
    for (const int64_t dim : {0, 1}) {
      const at::Tensor x = distribute_tensor(waves({3, 5, 4}), mesh, {Shard(dim)});
      CommDebugMode moved;
      EXPECT_EQ(placements(at::linear(x, w))[0], Shard(dim));
      EXPECT_EQ(placements(at::matmul(x, w.t()))[0], Shard(dim));
      EXPECT_EQ(moved.total(), 0);
    }
  });
}

TEST(Uneven, ViewsOfEmptyTensorsWork) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({0, 4}), mesh, {Shard(1)});
    EXPECT_EQ(full_tensor(x.reshape({0}).sum()).item<double>(), 0);
    EXPECT_EQ(full_tensor(at::einsum("ij,jk->ki", {distribute_tensor(at::ones({5, 0}), mesh, {Shard(0)}), x})).numel(),
              20);
  });
}

TEST(Uneven, TransposesInPlace) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = waves({3, 4});
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)});
    x.transpose_(0, 1);
    EXPECT_EQ(placements(x)[0], Shard(1));
    EXPECT_TRUE(full_tensor(x).equal(plain.t()));
  });
}

TEST(Uneven, AliasingViewsOfUnevenShardsAreRefused) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(waves({3, 4}), mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { x.view({12}); }), HasSubstr("Cannot flatten unevenly sharded tensor"));
    for (const at::Tensor& copy : {x.reshape({12}), x.unbind(0)[1], x.select(0, 1)}) {
      EXPECT_THAT(error_of([&] { copy.add_(1); }), StartsWith("Sharding dimension mismatch"));
    }
  });
}

TEST(Uneven, ViewsOfGatheredCopiesFollowTheirBase) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    for (const bool recorded : {false, true}) {
      const at::Tensor plain = waves({3, 4});
      const at::Tensor w = distribute_tensor(plain, mesh, {Shard(0)}).requires_grad_(recorded);
      const at::Tensor plain_w = plain.clone().requires_grad_(recorded);
      const auto run = [](const at::Tensor& leaf) {
        const at::Tensor x = leaf * 1;
        const at::Tensor flat = x.reshape({12});
        const at::Tensor row = x.select(0, 1);
        const at::Tensor part = row.narrow(0, 1, 2);
        const at::Tensor before = part * 1;
        x.mul_(2);
        const at::Tensor between = part * 3;
        x.select(1, 0).add_(leaf.select(1, 1));  // a write through another view of x
        return flat.pow(2).sum() + row.sum() * before.sum() + part.pow(3).sum() + between.sum();
      };
      const at::Tensor found = run(w);
      const at::Tensor wanted = run(plain_w);
      EXPECT_NEAR(full_tensor(found).item<double>(), wanted.item<double>(), 1e-9);
      if (recorded) {
        found.backward();
        wanted.backward();
        EXPECT_TRUE(full_tensor(w.grad()).allclose(plain_w.grad(), 1e-9));
      }
    }
  });
}

}  // namespace
}  // namespace tessera
