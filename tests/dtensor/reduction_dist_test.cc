// Tests which reductions leave a Partial result, and when Partial operands may be reduced one by one.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::on_ranks;

double value_of(const at::Tensor& tensor) { return full_tensor(tensor).to(at::kDouble).item<double>(); }

TEST(Reduction, MeanWeightsUnequalStridedShards) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor flat = at::arange(6, at::kDouble);
    const at::Tensor x = distribute_tensor(flat.view({2, 3}), mesh, {Shard(1)}).view({6});
    ASSERT_TRUE(placements(x)[0].is_strided_shard());
    EXPECT_EQ(value_of(x.mean()), 2.5);
    EXPECT_EQ(value_of(x.mean(0, /*keepdim=*/true).sum()), 2.5);
  });
}

TEST(Reduction, MeanOverEqualStridedShardsNeedsNoCommunication) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::arange(8, at::kDouble).view({2, 4}), mesh, {Shard(1)}).view({8});
    CommDebugMode moved;
    const at::Tensor mean = x.mean();
    EXPECT_EQ(moved.total(), 0);
    EXPECT_EQ(placements(mean)[0], Partial(ReduceOp::kAvg));
    EXPECT_EQ(value_of(mean), 3.5);
  });
}

TEST(Reduction, GradientOfVarianceOverStridedShardsOfTwoMeshDims) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const at::Tensor values = at::arange(12, at::kDouble).pow(2);
    const at::Tensor plain = values.clone().requires_grad_(true);
    plain.var().backward();
    for (const Placements& lie :
         {Placements{Shard(1), Shard(1)}, Placements{Shard(0), Shard(1)}, Placements{Shard(1), Shard(0)}}) {
      const at::Tensor x = distribute_tensor(values.view({2, 6}), mesh, lie).requires_grad_(true);
      at::Tensor flat;
      try {
        flat = x.view({12});
      } catch (const Error&) {
        continue;  // the shard cannot be flattened without communication
      }
      flat.var().backward();
      EXPECT_TRUE(full_tensor(x.grad()).view({12}).allclose(plain.grad(), 1e-9)) << to_string(lie);
    }
  });
}

TEST(Reduction, AnyIsPartialMax) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4, 8}, at::kBool), mesh, {Shard(1)});
    EXPECT_EQ(value_of(x.any(1).sum()), 4);
    EXPECT_EQ(full_tensor(x.any(1).to(at::kFloat)).max().item<float>(), 1);
    EXPECT_TRUE(full_tensor(x.any(1).logical_not()).logical_not().all().item<bool>());
    CommDebugMode moved;
    const at::Tensor nested = x.any(1).any(0);
    EXPECT_EQ(moved.total(), 0);
    EXPECT_EQ(placements(nested)[0], Partial(ReduceOp::kMax));
    EXPECT_EQ(value_of(nested), 1);
    // The maximum over the ranks may be zero where the value of one rank is not zero.
    const at::Tensor numbers = from_local(at::full({2}, -mesh->rank(), at::kLong), mesh, {Partial(ReduceOp::kMax)});
    EXPECT_EQ(value_of(numbers.any()), 0);
  });
}

TEST(Reduction, BooleanPartialIsReducedAsLogicalOr) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = from_local(at::ones({3}, at::kBool), mesh, {Partial()});
    EXPECT_EQ(value_of(x.sum()), 3);
    EXPECT_EQ(full_tensor(x.to(at::kLong)).max().item<int64_t>(), 1);
    EXPECT_EQ(full_tensor(x * 2.0).max().item<double>(), 2);
    EXPECT_EQ(full_tensor(at::cat({x, x})).sum().item<int64_t>(), 6);
  });
}

TEST(Reduction, OverflowingPartialIsReducedBeforeWidening) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = from_local(at::full({3}, 200, at::kByte), mesh, {Partial()});
    EXPECT_EQ(full_tensor(x.to(at::kLong)).max().item<int64_t>(), 144);
    EXPECT_EQ(value_of(x.sum()), 432);
    const at::Tensor ones = distribute_tensor(at::ones({3}, at::kInt), mesh, {Replicate()});
    EXPECT_EQ(full_tensor(x * ones).max().item<int64_t>(), 144);
  });
}

TEST(Reduction, NansumSkipsNanOfTheReducedValue) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    at::Tensor part = at::ones({2}, at::kDouble);
    if (mesh->rank() == 0) part[0] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_EQ(value_of(from_local(part, mesh, {Partial()}).nansum()), 2);
  });
}

TEST(Reduction, CatOfPartialProductOrAllWithReplicateIsCorrect) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = at::arange(1, 7, at::kDouble).view({2, 3});
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)});
    const at::Tensor whole = distribute_tensor(at::full({3}, 2.0, at::kDouble), mesh, {Replicate()});
    for (const bool first : {true, false}) {
      const at::Tensor product = x.prod(0);
      ASSERT_EQ(placements(product)[0], Partial(ReduceOp::kProduct));
      const at::Tensor joined = first ? at::cat({product, whole}) : at::stack({whole, product});
      const at::Tensor wanted = first ? at::cat({plain.prod(0), at::full({3}, 2.0, at::kDouble)})
                                      : at::stack({at::full({3}, 2.0, at::kDouble), plain.prod(0)});
      EXPECT_TRUE(full_tensor(joined).equal(wanted));
    }
    const at::Tensor truth = at::cat({x.gt(1).all(0), whole.gt(1)});
    EXPECT_EQ(full_tensor(truth).sum().item<int64_t>(), 5);
  });
}

}  // namespace
}  // namespace tessera
