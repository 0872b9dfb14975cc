// Tests DTensors with a lazy conjugation or negation (the conj and neg bits of a tensor) against plain tensors.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::on_ranks;

at::Tensor complex_values(std::vector<int64_t> sizes) {
  const at::Tensor flat = at::arange(c10::multiply_integers(sizes), at::kDouble).view(sizes);
  return at::complex(flat, flat * 2 - 3);
}

TEST(Conjugate, ConjBitMatchesPlainTensors) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = complex_values({4, 3});
    for (const Placement& lie : {Shard(0), Shard(1), Replicate()}) {
      const at::Tensor z = distribute_tensor(plain, mesh, {lie});
      EXPECT_TRUE(z.conj().is_conj());
      EXPECT_FALSE(z.conj().conj().is_conj());
      EXPECT_FALSE(z.conj().resolve_conj().is_conj());
      EXPECT_TRUE(
          full_tensor(at::view_as_real(z.conj().resolve_conj())).equal(at::view_as_real(plain.conj().resolve_conj())));
      EXPECT_TRUE(full_tensor(at::imag(z.conj())).equal(at::imag(plain.conj())));
      EXPECT_TRUE(full_tensor(at::real(z.conj())).equal(at::real(plain.conj())));
      EXPECT_THROW(at::view_as_real(z.conj()), c10::Error);  // plain tensors throw here too
    }
  });
}

TEST(Conjugate, OperationsOnLazilyConjugatedTensorsMatchPlainTensors) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = complex_values({4, 4});
    for (const Placement& lie : {Shard(0), Shard(1), Replicate(), Partial()}) {
      const at::Tensor z =
          lie.is_partial() ? from_local(plain / 2, mesh, {lie}) : distribute_tensor(plain, mesh, {lie});
      EXPECT_TRUE(full_tensor(z.conj() + z).equal(plain.conj() + plain));
      EXPECT_TRUE(full_tensor(z.conj().exp()).allclose(plain.conj().exp()));
      EXPECT_TRUE(full_tensor(at::mm(z.mH(), z)).allclose(at::mm(plain.mH(), plain)));
      EXPECT_TRUE(full_tensor(redistribute(z.conj(), {Replicate()})).equal(plain.conj()));
      EXPECT_TRUE(full_tensor(at::cat({z.conj(), z}, 0)).equal(at::cat({plain.conj(), plain}, 0)));
      EXPECT_EQ(full_tensor(z.conj().sum()).equal(plain.conj().sum()), true);
    }
  });
}

TEST(Conjugate, WritesThroughConjReachTheBase) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = complex_values({4, 3});
    const at::Tensor z = distribute_tensor(plain, mesh, {Shard(0)});
    z.conj().mul_(c10::complex<double>(0, 1));
    at::imag(z).add_(5);
    plain.conj().mul_(c10::complex<double>(0, 1));
    at::imag(plain).add_(5);
    EXPECT_TRUE(full_tensor(z).equal(plain));
  });
}

TEST(Conjugate, GradientsMatchPlainTensors) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = complex_values({4, 3}).requires_grad_(true);
    const at::Tensor z = distribute_tensor(plain.detach(), mesh, {Shard(0)}).requires_grad_(true);
    const auto loss = [](const at::Tensor& t) {
      return at::view_as_real((t.conj() * t * t).resolve_conj()).pow(2).sum();
    };
    loss(plain).backward();
    loss(z).backward();
    EXPECT_TRUE(full_tensor(z.grad()).allclose(plain.grad()));
  });
}

}  // namespace
}  // namespace tessera
