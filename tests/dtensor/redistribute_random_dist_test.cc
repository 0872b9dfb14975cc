// Tests redistribution: properties on random meshes, shapes and placements; steps over several mesh dims; asynchronous
// results; dtypes and gradients.
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>

#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::on_ranks;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

// One case. All values are drawn before the ranks start, so that the ranks agree.
struct Case {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  Placements from;
  Placements to;
};

Placement any_placement(int64_t ndim, bool partial, ReduceOp op) {
  const int kind = *rc::gen::inRange(0, partial ? 6 : 5);
  const auto dim = *rc::gen::inRange<int64_t>(0, ndim);
  switch (kind) {
    case 0:
      return Replicate();
    case 4:
      return StridedShard(dim, *rc::gen::inRange<int64_t>(2, 5));
    case 5:
      return Partial(op);
    default:
      return Shard(dim);
  }
}

Case any_case() {
  Case c;
  c.mesh = *rc::gen::elementOf(
      std::vector<std::vector<int64_t>>{{2}, {3}, {4}, {2, 2}, {1, 4}, {2, 3}, {2, 1, 2}, {2, 2, 2}});
  c.shape =
      *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange<size_t>(1, 4), rc::gen::inRange<int64_t>(0, 10));
  const ReduceOp op = *rc::gen::elementOf(std::vector<ReduceOp>(std::begin(kOps), std::end(kOps)));
  for (size_t i = 0; i < c.mesh.size(); ++i) {
    c.from.push_back(any_placement(static_cast<int64_t>(c.shape.size()), true, op));
    c.to.push_back(any_placement(static_cast<int64_t>(c.shape.size()), false, op));
  }
  return c;
}

// Returns a DTensor of distinct values with the placements `from`. The local tensors of a Partial differ from rank to
// rank, and their reduction is `whole`.
at::Tensor make(const at::Tensor& whole, const MeshPtr& mesh, const Placements& from) {
  Placements without = from;
  double factor = 1;
  double offset = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    if (!from[i].is_partial()) continue;
    without[i] = Replicate();
    const auto r = static_cast<double>(mesh->local_rank(static_cast<int64_t>(i)));
    const auto k = static_cast<double>(mesh->size(static_cast<int64_t>(i)));
    switch (from[i].reduce_op) {
      case ReduceOp::kSum:
        factor *= (r + 1) * 2 / (k * (k + 1));
        break;
      case ReduceOp::kAvg:
        factor *= (r + 1) * 2 / (k + 1);
        break;
      case ReduceOp::kMin:
        offset += r;
        break;
      case ReduceOp::kMax:
        offset -= r;
        break;
      case ReduceOp::kProduct:
        factor *= r == 0 ? 1 : 0;
        offset += r == 0 ? 0 : 1;
        break;
    }
  }
  const auto lies = distribute_tensor(whole, mesh, without, std::nullopt);
  return from_local(to_local(lies) * factor + offset, mesh, from,
                    {.shape = whole.sizes().vec(), .stride = whole.strides().vec()});
}

// Sets the number of cases to 40, because each case starts ranks of its own. RC_PARAMS="max_success=1000" runs more.
// The seed is printed.
void few_cases() { setenv("RC_PARAMS", "max_success=40", /*overwrite=*/0); }

void keeps_the_values() {
  const Case c = any_case();
  std::mutex mutex;
  std::string failure;
  on_ranks(static_cast<int>(c10::multiply_integers(c.mesh)), c.mesh, [&](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(1, 1 + c10::multiply_integers(c.shape), at::kDouble).view(c.shape);
    const auto fail = [&](const char* what, const at::Tensor& found) {
      std::lock_guard lock(mutex);
      failure =
          fmt::format("{} {}->{}: rank {} {}", what, to_string(c.from), to_string(c.to), mesh->rank(), c10::str(found));
    };
    const at::Tensor t = make(whole, mesh, c.from);
    const at::Tensor wanted = to_local(distribute_tensor(whole, mesh, c.to, std::nullopt));
    const at::Tensor moved = redistribute(t, c.to);
    if (!at::allclose(to_local(moved), wanted) || to_local(moved).sizes() != wanted.sizes()) {
      fail("moved", to_local(moved));
    }
    if (!at::allclose(full_tensor(moved), whole)) fail("full", full_tensor(moved));
    if (!at::allclose(to_local(redistribute(t, c.to, {.async_op = true})), wanted)) fail("async", to_local(moved));
    // Both planners are checked, not only the cheaper plan.
    const auto greedy = plan_greedy(whole.sizes(), *mesh, c.from, c.to);
    const auto wide = plan_multi_dim(whole.sizes(), *mesh, c.from, c.to);
    if (!at::allclose(run_redistribute(to_local(t), *mesh, greedy, false), wanted)) fail("greedy", to_local(t));
    if (!wide || !at::allclose(run_redistribute(to_local(t), *mesh, *wide, false), wanted)) fail("wide", to_local(t));
  });
  if (!failure.empty()) RC_FAIL(failure);
}

TEST(Redistribution, KeepsTheValuesOnAnyMesh) {
  few_cases();
  EXPECT_TRUE(rc::check(keeps_the_values));
}

void brings_gradients_back() {
  const Case c = any_case();
  std::atomic<bool> good = true;
  on_ranks(static_cast<int>(c10::multiply_integers(c.mesh)), c.mesh, [&](const MeshPtr& mesh) {
    Placements from = c.from;
    for (auto& p : from) p = p.is_partial() ? Replicate() : p;
    const at::Tensor whole = at::arange(c10::multiply_integers(c.shape), at::kDouble).view(c.shape);
    const at::Tensor leaf = distribute_tensor(whole.clone().set_requires_grad(true), mesh, from, std::nullopt);
    const at::Tensor weight = whole * 2 + 1;
    (full_tensor(redistribute(leaf, c.to)) * weight).sum().backward();
    good = good && placements(leaf.grad()) == from && at::equal(full_tensor(leaf.grad()), weight);
  });
  RC_ASSERT(good.load());
}

TEST(Redistribution, GradientsHaveTheInputsPlacements) {
  few_cases();
  EXPECT_TRUE(rc::check(brings_gradients_back));
}

struct Moved {
  const char* what;
  Placements from, to;
  int collectives;
  int64_t bytes;  // bytes that rank 0 receives of the double tensor [8, 8]
};

// The mesh is 2 x 2 ranks. In every row that does not say otherwise, upstream's greedy plan takes more collectives or
// bytes.
TEST(Redistribution, UsesMinimalCollectivesAndBytes) {
  const Placement r = Replicate(), s0 = Shard(0), s1 = Shard(1), p = Partial();
  const std::vector<Moved> rows = {
      {"nested shards to whole: one gather", {s0, s0}, {r, r}, 1, 384},
      {"shards of both dims to whole: one gather", {s0, s1}, {r, r}, 1, 384},
      {"partial twice to whole: one all-reduce", {p, p}, {r, r}, 1, 768},
      {"partial twice to nested shards: one reduce-scatter", {p, p}, {s0, s0}, 1, 384},
      {"partial twice to shards of both dims: one reduce-scatter", {p, p}, {s0, s1}, 1, 384},
      {"a shard moves to the other mesh dim", {r, s0}, {s0, r}, 1, 0},
      {"shards change places", {s0, s1}, {s1, s0}, 1, 0},
      {"nested shards of the other dim", {s0, s0}, {s1, s1}, 1, 96},
      {"partial and a shard to whole: reduced before it grows", {p, s0}, {r, r}, 2, 512},
      {"whole and partial: cut before it is reduced", {p, r}, {r, s0}, 1, 256},
      {"outer shard goes", {s0, s0}, {r, s0}, 1, 0},
      {"as upstream: inner shard goes", {s0, s0}, {s0, r}, 1, 128},
      {"as upstream: one dim of two", {s0, s1}, {s0, r}, 1, 128},
  };
  on_ranks(4, {2, 2}, [&](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(64, at::kDouble).view({8, 8});
    for (const auto& row : rows) {
      const at::Tensor t = make(whole, mesh, row.from);
      const auto greedy = plan_greedy(whole.sizes(), *mesh, row.from, row.to);
      CommDebugMode upstream;
      run_redistribute(to_local(t), *mesh, greedy, false);
      const auto count_upstream = upstream.comm_counts();
      CommDebugMode count;
      const at::Tensor moved = redistribute(t, row.to);
      EXPECT_EQ(count.total(), row.collectives) << row.what;
      EXPECT_LE(count.total(), count_upstream.total()) << row.what;
      EXPECT_LE(count.total_bytes(), count_upstream.total_bytes()) << row.what;
      if (mesh->rank() == 0 && row.bytes > 0) {
        EXPECT_EQ(count.total_bytes(), row.bytes) << row.what;
      }
      EXPECT_TRUE(at::allclose(full_tensor(moved), whole)) << row.what;
    }
  });
}

// A strided shard is split after the shards of later mesh dims, so its step waits for their steps. In the meantime no
// other step may split its tensor dim.
TEST(Redistribution, ReachesStridedShards) {
  on_ranks(8, {2, 2, 2}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(56, at::kDouble).view({7, 8});
    const std::vector<Placement> ways{Replicate(), Shard(0), Shard(1)};
    for (const auto& a : ways) {
      for (const auto& b : ways) {
        for (const auto& c : ways) {
          const at::Tensor t = distribute_tensor(whole, mesh, {a, b, c});
          for (const auto& to : std::vector<Placements>{{StridedShard(0, 2), Shard(1), Shard(0)},
                                                        {StridedShard(1, 2), Shard(1), Shard(0)},
                                                        {StridedShard(1, 4), Shard(1), Shard(1)},
                                                        {Shard(1), StridedShard(1, 2), Shard(1)}}) {
            EXPECT_TRUE(to_local(redistribute(t, to)).equal(to_local(distribute_tensor(whole, mesh, to))))
                << to_string(Placements{a, b, c}) << " to " << to_string(to);
          }
        }
      }
    }
  });
}

TEST(Redistribution, NormPartialsCombineAsNorms) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const double mine = mesh->rank() + 1.0;
    for (const float order : {1.0F, 2.0F, 3.0F}) {
      const double wanted = std::pow(1 + std::pow(2, order) + std::pow(3, order) + std::pow(4, order), 1 / order);
      const at::Tensor t = from_local(at::full({3}, mine), mesh, {NormPartial(order), NormPartial(order)});
      EXPECT_TRUE(at::allclose(full_tensor(t), at::full({3}, wanted))) << order;
      EXPECT_TRUE(at::allclose(full_tensor(redistribute(t, {Shard(0), Replicate()})), at::full({3}, wanted))) << order;
    }
    const auto infinite = from_local(at::full({1}, mine), mesh, {NormPartial(INFINITY), NormPartial(INFINITY)});
    EXPECT_EQ(full_tensor(infinite).item<double>(), 4);
    const auto counts = from_local(at::full({1}, mine), mesh, {NormPartial(0), NormPartial(0)});
    EXPECT_EQ(full_tensor(counts).item<double>(), 10);
  });
}

TEST(Redistribution, AsyncResultWaitsOnFirstUse) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(12, at::kFloat).view({6, 2});
    const at::Tensor t = distribute_tensor(whole, mesh, {Shard(0)});
    const auto start = [&] { return redistribute(t, {Replicate()}, {.async_op = true}); };
    at::Tensor pending = start();
    EXPECT_TRUE(is_pending(pending));
    EXPECT_EQ(pending.sizes(), whole.sizes());
    EXPECT_EQ(pending.scalar_type(), at::kFloat);
    EXPECT_TRUE(pending.is_contiguous() && is_pending(pending)) << "questions about the shape do not wait";
    const at::Tensor alias = pending.detach();
    EXPECT_TRUE(at::equal(to_local(pending + 1), whole + 1));
    EXPECT_FALSE(is_pending(pending));
    EXPECT_TRUE(at::equal(to_local(alias), whole)) << "an alias waits for the same work";
    EXPECT_THAT(str(start()), HasSubstr("[6, 2]"));
    at::Tensor written = start();
    written.add_(1);
    EXPECT_TRUE(at::equal(to_local(written), whole + 1));
    { const at::Tensor dropped = start(); }  // the collective ends although no code waits for its result
    const at::Tensor first = start(), second = start();
    EXPECT_TRUE(at::equal(to_local(second), whole) && at::equal(to_local(first), whole)) << "out of order";
    const at::Tensor uneven = distribute_tensor(at::arange(5), mesh, {Shard(0)});
    EXPECT_TRUE(at::equal(to_local(redistribute(uneven, {Replicate()}, {.async_op = true})), at::arange(5)));
    const at::Tensor cut = redistribute(redistribute(t, {Replicate()}), {Shard(1)}, {.async_op = true});
    EXPECT_FALSE(is_pending(cut)) << "nothing to wait for";
  });
}

TEST(Redistribution, CommunicatesInTheRequestedDtypes) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor t = distribute_tensor(at::ones({4, 2}).set_requires_grad(true), mesh, {Shard(0)});
    CommDebugMode count;
    const at::Tensor low = redistribute(t, {Replicate()}, {.forward_dtype = at::kBFloat16});
    EXPECT_EQ(low.scalar_type(), at::kBFloat16);
    EXPECT_EQ(count.total_bytes(), 8) << "half of a float's";
    low.sum().backward();
    EXPECT_EQ(t.grad().scalar_type(), at::kFloat);
    const at::Tensor whole = distribute_tensor(at::ones({4, 2}).set_requires_grad(true), mesh, {Replicate()});
    const at::Tensor cut = redistribute(whole, {Shard(0)}, {.backward_dtype = at::kBFloat16});
    EXPECT_EQ(cut.scalar_type(), at::kFloat);
    CommDebugMode back;
    cut.backward(distribute_tensor(at::ones({4, 2}), mesh, {Shard(0)}, std::nullopt));
    EXPECT_EQ(back.bytes(CommKind::kAllGather), 8);
    EXPECT_EQ(whole.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(full_tensor(whole.grad()), at::ones({4, 2})));
  });
}

TEST(Redistribution, IsTwiceDifferentiable) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::arange(1, 5, at::kDouble).set_requires_grad(true), mesh, {Shard(0)});
    const at::Tensor y = full_tensor(redistribute(x * x * x, {Replicate()})).sum();
    const at::Tensor first = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    full_tensor(first).sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(x.grad()), at::arange(1, 5, at::kDouble) * 6));
  });
}

TEST(Redistribution, GradPlacementsOfFromLocalAndFullTensorAreUsed) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor w = distribute_tensor(at::ones({4}).set_requires_grad(true), mesh, {Replicate()});
    (full_tensor(w, Placements{Partial()}) * (mesh->rank() + 1)).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({4}, 3.0)));
    const at::Tensor leaf = at::ones({4}).set_requires_grad(true);
    full_tensor(from_local(leaf, mesh, {Replicate()}, {.grad_placements = Placements{Partial()}})).sum().backward();
    const at::Tensor gradient = from_local(leaf.grad(), mesh, {Partial()});
    EXPECT_TRUE(at::equal(full_tensor(gradient), at::ones({4}))) << "a part of the gradient on each rank";
  });
}

}  // namespace
}  // namespace tessera
