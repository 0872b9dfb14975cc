// Tests wrong use of DTensors. Every rank must raise a clear error, and no rank may wait for another.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/functional.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

// Runs the wrong use on four ranks. Each rank must raise an error whose text matches. The ranks then communicate once
// more: a rank that had left or entered a collective alone would hang or mix up this collective.
template <class Wrong, class Matcher>
void expect_error_on_every_rank(Wrong wrong, Matcher matcher, const std::vector<int64_t>& shape = {2, 2}) {
  std::atomic<int> errors = 0;
  comm::run_thread_ranks(4, [&](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", shape);
    const std::string error = error_of([&] { wrong(mesh); });
    EXPECT_THAT(error, matcher) << "rank " << world->rank();
    errors += error != "no error";
    EXPECT_EQ(full_tensor(dtensor::ones({4}, mesh, Placements(mesh->ndim(), Partial()))).sum().item<double>(), 4);
  });
  EXPECT_EQ(errors.load(), 4);
}

TEST(Misuse, MixedMeshes) {
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        const auto flat = init_device_mesh(mesh->world(), "cpu", {4});
        at::add(dtensor::ones({4}, mesh), dtensor::ones({4}, flat));
      },
      AllOf(HasSubstr("Cannot run aten::add.Tensor on inputs with different meshes: got DeviceMesh((2, 2), 'cpu') and "
                      "DeviceMesh((4), 'cpu')"),
            HasSubstr("full_tensor and distribute_tensor")));
}

TEST(Misuse, WrongNumberOfPlacements) {
  const auto text = HasSubstr("found 1, wanted 2, one for each dim of DeviceMesh((2, 2), 'cpu')");
  expect_error_on_every_rank([](const MeshPtr& mesh) { distribute_tensor(at::ones({4}), mesh, {Shard(0)}); }, text);
  expect_error_on_every_rank([](const MeshPtr& mesh) { from_local(at::ones({4}), mesh, {Shard(0)}); }, text);
  expect_error_on_every_rank([](const MeshPtr& mesh) { redistribute(dtensor::ones({4}, mesh), {Shard(0)}); }, text);
  expect_error_on_every_rank([](const MeshPtr& mesh) { dtensor::zeros({4}, mesh, {Shard(0)}); }, text);
}

TEST(Misuse, DimOutOfRange) {
  const auto text = HasSubstr("sharded dim 1, wanted less than the tensor's 1 dims");
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        distribute_tensor(at::ones({4}), mesh, {Shard(1), Replicate()});
      },
      text);
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        redistribute(dtensor::ones({4}, mesh), {Replicate(), Shard(1)});
      },
      text);
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        from_local(at::ones({4}), mesh, {Shard(1), Replicate()});
      },
      text);
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        functional::all_gather(at::ones({4}), {mesh, 0}, 1);
      },
      HasSubstr("found dim 1 for a tensor of 1 dims"));
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        functional::all_reduce(at::ones({4}), {mesh, 2});
      },
      HasSubstr("found dim 2, wanted 0..1"));
}

// A Partial is reduced before its value is compared. Other frameworks compare the local tensor of one rank.
TEST(Misuse, PartialIsComparedByItsReducedValue) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {4});
    const auto part = from_local(at::full({2}, world->rank() + 1.0), mesh, {Partial()});  // its sum is ten
    EXPECT_TRUE(at::equal(part, dtensor::full({2}, 10.0, mesh, {}, {.dtype = part.scalar_type()})));
    EXPECT_TRUE(full_tensor(at::eq(part, 10)).all().item<bool>());
    EXPECT_TRUE(at::allclose(part, dtensor::full({2}, 10.0, mesh, {}, {.dtype = part.scalar_type()})));
    EXPECT_EQ(part.sum().item<double>(), 20);
    EXPECT_TRUE(part.max().gt(9.5).item<bool>());
  });
}

TEST(Misuse, LocalTensorsThatDifferBetweenRanks) {
  for (const int odd : {0, 3}) {  // ranks 0 and 3: in each mesh dim only one group of ranks sees the difference
    expect_error_on_every_rank(
        [odd](const MeshPtr& mesh) {
          from_local(at::ones({mesh->rank() == odd ? 3 : 2, 2}), mesh, {Shard(0), Shard(1)}, {.run_check = true});
        },
        AllOf(HasSubstr("Inconsistent tensor metadata (including shape and stride) across ranks."), HasSubstr("[3, 2]"),
              HasSubstr("[2, 2]")));
    expect_error_on_every_rank(
        [odd](const MeshPtr& mesh) {
          from_local(at::ones({2}, mesh->rank() == odd ? at::kInt : at::kFloat), mesh, {Shard(0), Replicate()},
                     {.run_check = true});
        },
        AllOf(HasSubstr("int"), HasSubstr("float")));
    expect_error_on_every_rank(
        [odd](const MeshPtr& mesh) {
          from_local(at::ones({mesh->rank() == odd ? 3 : 2}), mesh, {Shard(0), Replicate()},
                     {.shape = std::vector<int64_t>{4}, .stride = std::vector<int64_t>{1}, .run_check = true});
        },
        HasSubstr("found shape [3], wanted [2]"));
  }
}

TEST(Misuse, RanksOutsideTheMesh) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto pair = init_device_mesh(world, "cpu", {2});
    const bool inside = world->rank() < 2;
    // On a rank outside the mesh, operations on DTensors give empty local tensors, as upstream.
    const auto t = distribute_tensor(at::arange(6, at::kFloat), pair, {Shard(0)});
    const auto y = redistribute(at::relu(t) + 1, {Replicate()});
    EXPECT_EQ(y.sizes(), (at::IntArrayRef{6}));
    EXPECT_EQ(to_local(y).numel(), inside ? 6 : 0);
    EXPECT_EQ(t.sum().item<double>(), inside ? 15 : 0);
    if (!inside) {
      const auto text = HasSubstr("is not part of the mesh");
      EXPECT_THAT(error_of([&] { functional::all_reduce(at::ones({2}), {pair}); }), text);
      EXPECT_THAT(error_of([&] { pair->group(0); }), text);
      EXPECT_THAT(error_of([&] { pair->local_rank(0); }), text);
      EXPECT_THAT(error_of([&] { local_box({6}, *pair, {Shard(0)}); }), text);
    }
    comm::barrier(*world->group());
  });
}

TEST(Misuse, PlainTensorsMixedWithDTensors) {
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) { at::add(dtensor::ones({4}, mesh), at::ones({4})); },
      AllOf(HasSubstr("aten::add.Tensor got mixed torch.Tensor and DTensor"), HasSubstr("argument 'other'"),
            HasSubstr("[4]"), HasSubstr("distribute_tensor or from_local")));
  comm::run_thread_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2});
    const auto t = dtensor::ones({4}, mesh, {Shard(0)});
    EXPECT_TRUE(at::equal(full_tensor(at::add(t, at::full({}, 2))), at::full({4}, 3.0)))
        << "one number is alike everywhere";
  });
}

TEST(Misuse, InvalidWritesAndRedistributions) {
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        dtensor::ones({4, 4}, mesh, {Shard(0), Replicate()})
            .add_(dtensor::ones({4, 4}, mesh, {Partial(), Partial()}).mul(2))
            .resize_({2});
      },
      HasSubstr("no storage of its own"));
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        from_local(at::ones({4}), mesh, {Partial(), Replicate()}).add_(1);
      },
      AllOf(::testing::StartsWith("Sharding dimension mismatch"), HasSubstr("(P(sum), R)")));
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        redistribute(dtensor::ones({4}, mesh), {Partial(), Replicate()});
      },
      HasSubstr("Can not redistribute from R to P(sum), redistributing to Partial is for internal use only!"));
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        from_local(at::ones({4}), mesh, {Partial(), Partial(ReduceOp::kMax)});
      },
      HasSubstr("different reductions on one tensor"));
}

TEST(Misuse, InvalidFunctionalCollectives) {
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        functional::all_reduce(dtensor::ones({4}, mesh), {mesh, 0});
      },
      HasSubstr("found a DTensor, wanted a plain tensor. Use redistribute"));
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        functional::reduce_scatter(at::ones({3}), {mesh, 0});
      },
      HasSubstr("found 3 elements, wanted a multiple of the 2 ranks"));
  expect_error_on_every_rank(
      [](const MeshPtr& mesh) {
        const auto x = at::ones({2}).set_requires_grad(true);
        functional::all_reduce(x, {mesh, 0}, ReduceOp::kMax).sum().backward();
      },
      HasSubstr("backward only supports 'sum' and 'avg' reductions, got 'max'"));
}

}  // namespace
}  // namespace tessera
