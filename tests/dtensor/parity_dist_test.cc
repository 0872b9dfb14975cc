// Tests operations that DTensors once refused and plain tensors run. Values and gradients are compared with plain
// tensors, for sharded and Partial operands.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::on_ranks;

struct ParityCase {
  const char* name;
  std::vector<int64_t> sizes;
  std::function<at::Tensor(const at::Tensor& x)> run;
};

at::Tensor ripples(std::vector<int64_t> sizes) {
  return (at::arange(c10::multiply_integers(sizes), at::kDouble) * 0.61 + 0.2).sin().view(sizes);
}

// Returns `plain` as a replicated DTensor on the mesh of `x`, or as it is if `x` is a plain tensor.
at::Tensor on_mesh_of(const at::Tensor& plain, const at::Tensor& x) {
  if (!is_dtensor(x)) return plain;
  const MeshPtr& mesh = device_mesh(x);
  return distribute_tensor(plain, mesh, Placements(static_cast<size_t>(mesh->ndim()), Replicate()));
}

at::Tensor some_indices(const at::Tensor& x) { return on_mesh_of(at::tensor({1, 0, 2, 1}, at::kLong), x); }

c10::List<std::optional<at::Tensor>> by(const at::Tensor& index) {
  c10::List<std::optional<at::Tensor>> list;
  list.push_back(index);
  return list;
}

std::vector<ParityCase> products_and_views() {
  return {
      {"einsum",
       {5, 3},
       [](const at::Tensor& x) {
         return at::einsum("ij,kj->ki", {x, x.sin()});
       }},
      {"einsum of a row",
       {1, 5},
       [](const at::Tensor& x) {
         return at::einsum("ij,jk->ik", {x, x.t()});
       }},
      {"einsum, written",
       {5, 3},
       [](const at::Tensor& x) {
         const at::Tensor y = at::einsum("ij,kj->ik", {x, x});
         return y.mul_(2);
       }},
      {"tensordot", {3, 5, 4}, [](const at::Tensor& x) { return at::tensordot(x, x.select(1, 0), {2}, {1}); }},
      {"inner", {5, 3}, [](const at::Tensor& x) { return at::inner(x, x.cos()); }},
      {"linear with a bias, written",
       {1, 3},
       [](const at::Tensor& x) {
         const at::Tensor y = at::linear(x.select(0, 0), x, x.select(1, 0));
         return y.mul_(2);
       }},
      {"ravel", {5, 3}, [](const at::Tensor& x) { return x.ravel().sin(); }},
      {"kron", {3, 2}, [](const at::Tensor& x) { return at::kron(x, x); }},
      {"stack of complex and real",
       {3, 2},
       [](const at::Tensor& x) {
         const at::Tensor c = at::complex(x, x * 2);
         return at::view_as_real(at::stack({c, x.amax({0}).expand({3, 2}), c}));
       }},
      {"transposed in place, then written",
       {5, 3},
       [](const at::Tensor& x) {
         const at::Tensor h = x * 1;
         const at::Tensor view = h.unsqueeze(0);
         view.transpose_(0, 2);
         view.mul_(3);
         view.squeeze_();
         view.add_(x.t());
         return h;
       }},
  };
}

std::vector<ParityCase> reductions_and_indices() {
  return {
      {"trace", {5, 3}, [](const at::Tensor& x) { return at::trace(x); }},
      {"trace of a wide matrix", {2, 7}, [](const at::Tensor& x) { return at::trace(x.sin()); }},
      {"glu", {4, 3}, [](const at::Tensor& x) { return at::glu(x, 0); }},
      {"aminmax",
       {5, 3},
       [](const at::Tensor& x) {
         const auto [least, most] = at::aminmax(x);
         return least * most;
       }},
      {"aminmax of a dim",
       {5, 3},
       [](const at::Tensor& x) {
         const auto [least, most] = at::aminmax(x, 1, true);
         return most - least * 2;
       }},
      {"count_nonzero",
       {5, 3},
       [](const at::Tensor& x) { return x.sum() * at::count_nonzero(x.gt(0), c10::IntArrayRef({1})).to(at::kDouble); }},
      {"complex", {5, 3}, [](const at::Tensor& x) { return at::view_as_real(at::complex(x, x * 2).pow(2)); }},
      {"masked_select", {5, 3}, [](const at::Tensor& x) { return x.masked_select(x.gt(0)); }},
      {"index by a mask", {5, 3}, [](const at::Tensor& x) { return x.index(by(x.gt(0))); }},
      {"masked_scatter", {5, 3}, [](const at::Tensor& x) { return x.masked_scatter(x.gt(0), x.sin()); }},
      {"prod with a zero",
       {5, 3},
       [](const at::Tensor& x) {
         return (x * on_mesh_of(at::arange(15).view({5, 3}), x)).prod();
       }},
      {"prod of rows with zeros",
       {5, 3},
       [](const at::Tensor& x) {
         return (x * on_mesh_of(at::arange(15).view({5, 3}).remainder(4), x)).prod(1);
       }},
      {"take", {5, 3}, [](const at::Tensor& x) { return x.take(some_indices(x)); }},
      {"sgn of an index", {5, 3}, [](const at::Tensor& x) { return x.index(by(some_indices(x))).sgn() + x.sum(); }},
  };
}

void check_parity(const ParityCase& c, const MeshPtr& mesh) {
  const at::Tensor x = ripples(c.sizes).requires_grad_(true);
  const at::Tensor wanted = c.run(x);
  wanted.pow(2).sum().backward();
  std::vector<Placement> ways{Replicate(), Partial()};
  for (int64_t dim = 0; dim < x.dim(); ++dim) ways.push_back(Shard(dim));
  for (const auto& first : ways) {
    for (const auto& last : ways) {
      const Placements lie = mesh->ndim() == 1 ? Placements{first} : Placements{last, first};
      const at::Tensor dx = distribute_tensor(x.detach(), mesh, lie).requires_grad_(true);
      const at::Tensor found = c.run(dx);
      EXPECT_TRUE(full_tensor(found).allclose(wanted, 1e-9)) << c.name << " " << to_string(lie);
      found.pow(2).sum().backward();
      EXPECT_TRUE(full_tensor(dx.grad()).allclose(x.grad(), 1e-9)) << c.name << " " << to_string(lie);
      if (mesh->ndim() == 1) break;
    }
  }
}

TEST(Parity, ProductsAndViews) {
  for (const auto& mesh_shape : std::vector<std::vector<int64_t>>{{2}, {2, 2}}) {
    on_ranks(static_cast<int>(c10::multiply_integers(mesh_shape)), mesh_shape, [](const MeshPtr& mesh) {
      for (const auto& c : products_and_views()) check_parity(c, mesh);
    });
  }
}

TEST(Parity, ReductionsAndIndices) {
  for (const auto& mesh_shape : std::vector<std::vector<int64_t>>{{2}, {2, 2}}) {
    on_ranks(static_cast<int>(c10::multiply_integers(mesh_shape)), mesh_shape, [](const MeshPtr& mesh) {
      for (const auto& c : reductions_and_indices()) check_parity(c, mesh);
    });
  }
}

// A result that is a view of the operand itself still refuses writes that would be lost.
TEST(Parity, DiagonalByEinsumIsAView) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(ripples({4, 4}), mesh, {Shard(0)});
    const at::Tensor diagonal = at::einsum("ii->i", {x});
    EXPECT_TRUE(full_tensor(diagonal).equal(ripples({4, 4}).diagonal()));
    EXPECT_THAT(error_of([&] { diagonal.mul_(2); }), ::testing::StartsWith("Sharding dimension mismatch"));
  });
}

// A plain gradient counts as replicated only if all ranks have the same values.
TEST(Parity, PlainGradientsThatDifferBetweenRanksAreRefused) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor w = distribute_tensor(ripples({4, 3}), mesh, {Shard(0)}).requires_grad_(true);
    for (const bool alike : {true, false}) {
      const at::Tensor plain = ripples({4, 3}) + (alike ? 0 : mesh->rank());
      const at::Tensor y = w * 2;
      y.register_hook([plain](const at::Tensor& gradient) { return gradient * plain; });
      if (alike) {
        y.sum().backward();
        EXPECT_TRUE(full_tensor(w.grad()).allclose(ripples({4, 3}) * 2, 1e-9));
      } else {
        EXPECT_THAT(error_of([&] { y.sum().backward(); }), ::testing::HasSubstr("got mixed torch.Tensor and DTensor"));
      }
    }
  });
}

// The sum is exact, because one rank holds the full value and the others hold zeros.
TEST(Parity, ReplicateToPartialIsExact) {
  on_ranks(3, {3}, [](const MeshPtr& mesh) {
    const at::Tensor x = ripples({7}).to(at::kFloat);
    EXPECT_TRUE(full_tensor(distribute_tensor(x, mesh, {Partial()})).equal(x));
    const at::Tensor nothing = distribute_tensor(at::zeros_like(x), mesh, {Partial()});
    EXPECT_TRUE(full_tensor(distribute_tensor(x, mesh, {Replicate()}) + nothing).equal(x));
  });
}

}  // namespace
}  // namespace tessera
