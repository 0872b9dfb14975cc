// Tests that sizes, strides and dtypes of results are those of the plain operation on the whole tensors, on all ranks
// and for all placements.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/random/random.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::on_ranks;

at::Tensor counted(std::vector<int64_t> sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).view(sizes);
}

TEST(Strides, MatchPlainTensorsWhenARankHasOneRow) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = counted({4, 3, 5});
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(1)});
    const at::Tensor sum = x.transpose(0, 1) + 1;
    EXPECT_EQ(sum.strides(), (plain.transpose(0, 1) + 1).strides());
    // matmul may fold its batch dims. All ranks must make the same decision to fold.
    const at::Tensor product = at::matmul(sum, distribute_tensor(counted({5, 2}), mesh, {Replicate()}));
    EXPECT_TRUE(full_tensor(product).equal(at::matmul(plain.transpose(0, 1) + 1, counted({5, 2}))));
  });
}

TEST(Strides, PermutedOperandsMatchPlainTensorsOnAllPlacements) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = counted({3, 2, 5});
    const auto all = [&](const at::Tensor& t) {
      return std::vector<at::Tensor>{t.permute({2, 0, 1}) * 2,
                                     t.permute({2, 0, 1}).exp(),
                                     t.permute({1, 2, 0}).clone(),
                                     t.transpose(1, 2).sum(0),
                                     t.transpose(0, 2).cumsum(0),
                                     t.permute({2, 1, 0}).softmax(1),
                                     at::cat({t.transpose(0, 1), t.transpose(0, 1)}),
                                     at::zeros_like(t.permute({1, 2, 0})),
                                     t.transpose(0, 2).narrow(2, 1, 2).exp()};
    };
    const auto wanted = all(plain);
    for (const Placement& a : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
      for (const Placement& b : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
        const auto found = all(distribute_tensor(plain, mesh, {a, b}));
        for (size_t i = 0; i < wanted.size(); ++i) {
          const bool copied = i + 1 == wanted.size() && (a.is_shard(0) || b.is_shard(0));  // a sharded dim is narrowed
          EXPECT_TRUE(copied || found[i].strides() == wanted[i].strides()) << i << " " << to_string(Placements{a, b});
          EXPECT_TRUE(full_tensor(found[i]).allclose(wanted[i], 1e-12)) << i;
          // If the whole tensor can be viewed in a shape, each local tensor can be viewed too.
          EXPECT_EQ(full_tensor(found[i].transpose(0, 1).contiguous().reshape({-1}).sum()).numel(), 1);
        }
      }
    }
  });
}

// These operations have no kernel for meta tensors, which would give the strides of their results.
TEST(Strides, PermutedOperandsMatchPlainTensorsWithoutMetaKernels) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = counted({3, 2, 5}) / 31 + 0.01;
    const auto all = [&](const at::Tensor& given) {
      const ImplicitReplication alike;
      const at::Tensor t = given.permute({2, 0, 1}), positive = given.transpose(0, 2);
      return std::vector<std::pair<const char*, at::Tensor>>{
          {"flip", t.flip({1})},
          {"rot90", at::rot90(t, 1, {0, 1})},
          {"roll", t.roll({2}, {0})},
          {"roll of all", t.roll({2}, {})},
          {"angle", at::angle(t)},
          {"isnan", at::isnan(t)},
          {"relu", at::relu(t)},
          {"hardtanh", at::hardtanh(t)},
          {"hardswish", at::hardswish(t)},
          {"logit", at::logit(positive)},
          {"floor_divide", at::floor_divide(t, 0.1)},
          {"huber_loss", at::huber_loss(t, t, at::Reduction::None)},
          {"binary_cross_entropy", at::binary_cross_entropy(positive, positive, {}, at::Reduction::None)},
          {"where", at::where(t > 0.5, t, -t)},
          {"bucketize", at::bucketize(t, at::arange(3, at::kDouble) / 3)},
          {"nansum", at::nansum(t, {0})},
          {"prod", at::prod(t, 0)},
          {"std", at::std(t, {0}, std::optional<at::Scalar>(1))},
          {"var of two dims kept", at::var(t, {0, 2}, std::optional<at::Scalar>(1), true)},
          {"count_nonzero", at::count_nonzero(t, std::vector<int64_t>{0})},
          {"take", at::take(t, at::arange(6).view({2, 3}).t())},
          {"addbmm",
           at::addbmm(t.select(0, 0).t(), positive.transpose(1, 2).narrow(1, 0, 2), positive.narrow(2, 0, 3))}};
    };
    const auto wanted = all(plain);
    for (const Placement& a : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
      for (const Placement& b : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
        const auto found = all(distribute_tensor(plain, mesh, {a, b}));
        for (size_t i = 0; i < wanted.size(); ++i) {
          const auto& [name, tensor] = found[i];
          EXPECT_EQ(tensor.strides(), wanted[i].second.strides()) << name << " " << to_string(Placements{a, b});
          EXPECT_TRUE(full_tensor(tensor).allclose(wanted[i].second, 1e-12)) << name << to_string(Placements{a, b});
        }
      }
    }
  });
}

TEST(Strides, GatheredViewHasTheLayoutOfItsLocalTensor) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = counted({4, 3, 5});
    const at::Tensor view = distribute_tensor(plain, mesh, {Shard(1)}).transpose(0, 2).narrow(1, 0, 2);
    EXPECT_EQ(placements(view)[0], Replicate());
    EXPECT_TRUE(to_local(view).sizes() == view.sizes());
    EXPECT_EQ(view.is_contiguous(), to_local(view).is_contiguous());
    EXPECT_TRUE(full_tensor(view.reshape({-1})).equal(plain.transpose(0, 2).narrow(1, 0, 2).reshape({-1})));
  });
}

// The world has three ranks, the mesh has two of them.
void on_part_of_the_world(const std::function<void(const MeshPtr&)>& body) {
  comm::run_thread_ranks(3, [&](std::shared_ptr<comm::World> world) {
    body(make_device_mesh(world, "cpu", {0, 1}, {2}));
  });
}

TEST(OutsideTheMesh, ResultsHaveTheDtypeOfTheOperation) {
  on_part_of_the_world([](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(counted({4, 6}).to(at::kFloat), mesh, {Shard(0)});
    EXPECT_EQ(x.argmax(1).scalar_type(), at::kLong);
    EXPECT_EQ(x.gt(0).scalar_type(), at::kBool);
    EXPECT_EQ(x.to(at::kDouble).scalar_type(), at::kDouble);
    EXPECT_EQ(std::get<1>(x.sort(1)).scalar_type(), at::kLong);
    EXPECT_EQ((x > 0).sum().scalar_type(), at::kLong);
    EXPECT_EQ(to_local(x.argmax(1)).scalar_type(), at::kLong);
  });
}

TEST(OutsideTheMesh, ResultsHaveTheSamePlacementsAsInside) {
  on_part_of_the_world([](const MeshPtr& mesh) {
    const at::Tensor a = distribute_tensor(counted({8, 6}), mesh, {Shard(0)});
    const at::Tensor b = distribute_tensor(counted({6, 4}), mesh, {Shard(0)});
    EXPECT_EQ(placements(at::mm(a, b))[0], Shard(0));  // the smaller operand is gathered
    EXPECT_EQ(a.t().add(1).strides(), at::IntArrayRef({1, 6}));
  });
}

TEST(OutsideTheMesh, RandomOperationsAdvanceTheSameOffset) {
  on_part_of_the_world([](const MeshPtr& mesh) {
    manual_seed(3, mesh);
    const at::Tensor x = distribute_tensor(counted({4, 6}), mesh, {Shard(0)});
    const auto count = [&] { return random_state(mesh).offset; };
    at::native_dropout(x, 0.5, /*train=*/false);
    EXPECT_EQ(count(), 0);
    at::native_dropout(x, 1.0, /*train=*/true);
    EXPECT_EQ(count(), 0);
    at::rrelu(x, 0.1, 0.3, /*training=*/false);
    EXPECT_EQ(count(), 0);
    x.clone().uniform_(0, 1, at::detail::createCPUGenerator(5));
    EXPECT_EQ(count(), 0);
    at::native_dropout(x, 0.5, /*train=*/true);
    EXPECT_EQ(count(), 1);
  });
}

}  // namespace
}  // namespace tessera
