// Tests placements, local tensors, and redistribution between all pairs of placement lists.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using ::testing::StartsWith;

TEST(LocalRange, FollowsTheChunkRuleOfPyTorch) {
  struct Row {
    int64_t n, k;
    std::vector<int64_t> sizes, offsets;
  };
  const std::vector<Row> rows = {{5, 4, {2, 2, 1, 0}, {0, 2, 4, 5}}, {6, 4, {2, 2, 2, 0}, {0, 2, 4, 6}},
                                 {4, 4, {1, 1, 1, 1}, {0, 1, 2, 3}}, {3, 4, {1, 1, 1, 0}, {0, 1, 2, 3}},
                                 {1, 4, {1, 0, 0, 0}, {0, 1, 1, 1}}, {0, 4, {0, 0, 0, 0}, {0, 0, 0, 0}},
                                 {7, 3, {3, 3, 1}, {0, 3, 6}},       {10, 4, {3, 3, 3, 1}, {0, 3, 6, 9}}};
  for (const auto& row : rows) {
    for (int64_t r = 0; r < row.k; ++r) {
      const auto range = local_range(row.n, row.k, r);
      EXPECT_EQ(range.size, row.sizes[r]) << row.n << " over " << row.k << " at " << r;
      EXPECT_EQ(range.offset, row.offsets[r]) << row.n << " over " << row.k << " at " << r;
    }
  }
}

TEST(LocalBox, NestsShardsOfOneDimFromLeftToRight) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    struct Row {
      int64_t n;
      std::vector<int64_t> sizes, offsets;
    };
    for (const auto& row : std::vector<Row>{{5, {2, 1, 1, 1}, {0, 2, 3, 4}},
                                            {6, {2, 1, 2, 1}, {0, 2, 3, 5}},
                                            {3, {1, 1, 1, 0}, {0, 1, 2, 3}},
                                            {2, {1, 0, 1, 0}, {0, 2, 1, 2}}}) {
      const auto box = local_box({row.n}, *mesh, {Shard(0), Shard(0)});
      EXPECT_EQ(box.shape[0], row.sizes[mesh->rank()]) << row.n;
      EXPECT_EQ(box.offset[0], row.offsets[mesh->rank()]) << row.n;
    }
  });
}

TEST(Placements, TextMatchesPyTorch) {
  EXPECT_EQ(to_string(Placements{Replicate(), Shard(0), StridedShard(0, 4), Partial(), NormPartial(2)}),
            "(R, S(0), _S(0, 4), P(sum), _NormP(2))");
  EXPECT_EQ(to_string(Partial(ReduceOp::kAvg)), "P(avg)");
}

TEST(StridedShard, HoldsTheSameElementsAsInPyTorch) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    struct Row {
      int64_t n;
      std::vector<int64_t> first, second;
    };
    for (const auto& row : std::vector<Row>{{8, {0, 1, 4, 5}, {2, 3, 6, 7}},
                                            {7, {0, 1, 4, 5}, {2, 3, 6}},
                                            {6, {0, 1, 3, 4}, {2, 5}},
                                            {5, {0, 1, 3}, {2, 4}}}) {
      for (const std::optional<int> src : {std::optional<int>(0), std::optional<int>()}) {
        const auto t = distribute_tensor(at::arange(row.n), mesh, {StridedShard(0, 2)}, src);
        EXPECT_TRUE(at::equal(to_local(t), at::tensor(mesh->rank() == 0 ? row.first : row.second))) << str(t);
        EXPECT_TRUE(at::equal(full_tensor(t), at::arange(row.n))) << row.n;
      }
    }
  });
}

TEST(FromLocal, ComputesGlobalShapeAndStridesAndChecksGivenOnes) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto t = from_local(at::ones({2, 3}), mesh, {Shard(1)});
    EXPECT_EQ(t.sizes(), (at::IntArrayRef{2, 6}));
    EXPECT_EQ(t.strides(), (at::IntArrayRef{6, 1}));
    const auto transposed = from_local(at::ones({3, 2}).t(), mesh, {Shard(0)});
    EXPECT_EQ(transposed.sizes(), (at::IntArrayRef{4, 3}));
    EXPECT_EQ(transposed.strides(), (at::IntArrayRef{1, 4}));
    const auto uneven = from_local(at::ones({mesh->rank() == 0 ? 2 : 1, 3}), mesh, {Shard(0)},
                                   {.shape = std::vector<int64_t>{3, 3}, .stride = std::vector<int64_t>{3, 1}});
    EXPECT_TRUE(at::equal(full_tensor(uneven), at::ones({3, 3})));
    EXPECT_THAT(error_of([&] {
                  from_local(at::ones({2, 3}), mesh, {Shard(0)},
                             {.shape = std::vector<int64_t>{9, 3}, .stride = std::vector<int64_t>{3, 1}});
                }),
                HasSubstr("found shape [2, 3], wanted"));
    EXPECT_THAT(error_of([&] {
                  from_local(at::ones({2, 3}), mesh, {Shard(0)}, {.shape = std::vector<int64_t>{4, 3}});
                }),
                HasSubstr("pass both shape and stride"));
    EXPECT_THAT(error_of([&] {
                  from_local(at::ones({2 + mesh->rank(), 3}), mesh, {Shard(1)}, {.run_check = true});
                }),
                HasSubstr("across ranks"));
    const auto checked = from_local(at::full({2}, mesh->rank() + 1.0), mesh, {Replicate()}, {.run_check = true});
    EXPECT_TRUE(at::equal(to_local(checked), at::ones({2})));
  });
}

TEST(DistributeTensor, SendsFromTheSrcRankOrSlicesLocally) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    for (const int64_t n : {0, 1, 3, 5, 9}) {
      const at::Tensor mine = at::arange(n * 2, at::kFloat).view({n, 2}) + 100 * mesh->rank();
      for (const Placement& p : {Shard(0), Shard(1), Replicate()}) {
        const auto t = distribute_tensor(mine, mesh, {p}, 2);
        EXPECT_TRUE(at::equal(full_tensor(t), mine - 100 * mesh->rank() + 200)) << to_string(p) << n;
        const auto own = distribute_tensor(mine, mesh, {p}, std::nullopt);
        const auto box = local_box({n, 2}, *mesh, {p});
        EXPECT_TRUE(at::equal(to_local(own), mine.narrow(0, box.shape[0] ? box.offset[0] : 0, box.shape[0])
                                                 .narrow(1, box.shape[1] ? box.offset[1] : 0, box.shape[1])));
      }
    }
    const auto leaf = at::ones({4}).set_requires_grad(true);
    const auto t = distribute_tensor(leaf, mesh, {Shard(-1)});
    EXPECT_TRUE(t.is_leaf() && t.requires_grad());
    EXPECT_EQ(placements(t)[0], Shard(0));
    EXPECT_THAT(error_of([&] { distribute_tensor(leaf * 2, mesh, {Shard(0)}); }), HasSubstr("non-leaf tensor"));
    EXPECT_THAT(error_of([&] { distribute_tensor(leaf, mesh, {Shard(0), Shard(0)}); }), HasSubstr("one for each dim"));
    EXPECT_THAT(error_of([&] { distribute_tensor(leaf, mesh, {Shard(1)}); }), HasSubstr("sharded dim 1"));
    EXPECT_THAT(error_of([&] { distribute_tensor(t, mesh, {Replicate()}); }), HasSubstr("different placements"));
  });
}

TEST(Redistribute, ToPartialIsRefused) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto t = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    EXPECT_THAT(
        error_of([&] { redistribute(t, {Partial()}); }),
        HasSubstr("Can not redistribute from S(0) to P(sum), redistributing to Partial is for internal use only!"));
    EXPECT_THAT(error_of([&] { redistribute(t, {Shard(3)}); }), HasSubstr("sharded dim 3"));
    EXPECT_THAT(error_of([&] { redistribute(t, {Replicate(), Replicate()}); }), HasSubstr("one for each dim"));
    EXPECT_THAT(error_of([&] { redistribute(at::ones({2}), {Replicate()}); }), HasSubstr("wanted a DTensor"));
  });
}

// All kinds of placements on one mesh dim that a tensor of two dims can be redistributed to.
std::vector<Placement> reachable() { return {Replicate(), Shard(0), Shard(1), StridedShard(0, 2), StridedShard(1, 3)}; }

TEST(Redistribute, KeepsValuesBetweenAllPairsOnOneDim) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    for (const int64_t rows : {0, 1, 3, 5, 9}) {
      const at::Tensor whole = at::arange(rows * 6, at::kDouble).view({rows, 6});
      for (const auto& from : reachable()) {
        for (const auto& to : reachable()) {
          const auto t = redistribute(distribute_tensor(whole, mesh, {from}, std::nullopt), {to});
          const auto wanted = to_local(distribute_tensor(whole, mesh, {to}, std::nullopt));
          EXPECT_TRUE(at::equal(to_local(t), wanted)) << rows << ' ' << to_string(from) << "->" << to_string(to);
        }
      }
      for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin}) {
        for (const auto& to : reachable()) {
          const auto part = from_local(whole + mesh->rank(), mesh, {Partial(op)});
          const at::Tensor reduced = op == ReduceOp::kSum   ? whole * 4 + 6
                                     : op == ReduceOp::kAvg ? whole + 1.5
                                     : op == ReduceOp::kMax ? whole + 3
                                                            : whole;
          EXPECT_TRUE(at::allclose(full_tensor(redistribute(part, {to})), reduced)) << comm::to_string(op);
        }
      }
    }
  });
}

TEST(Redistribute, KeepsValuesBetweenRandomPlacementsOnTwoAndThreeDims) {
  constexpr int kRounds = 40;
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {2, 1, 2}}) {
    on_ranks(4, shape, [&](const MeshPtr& mesh) {
      std::mt19937 random(seed);
      const auto any = [&](bool partial) {
        Placements list;
        for (int64_t i = 0; i < mesh->ndim(); ++i) {
          auto choices = reachable();
          choices.push_back(partial ? Partial() : Shard(0));
          list.push_back(choices[random() % choices.size()]);
        }
        return list;
      };
      for (int round = 0; round < kRounds; ++round) {
        const int64_t rows = random() % 10;
        const at::Tensor whole = at::arange(rows * 5, at::kDouble).view({rows, 5});
        const Placements from = any(true);
        const Placements to = any(false);
        const auto t = distribute_tensor(whole, mesh, from, round % 2 == 0 ? std::optional<int>(0) : std::nullopt);
        ASSERT_TRUE(at::allclose(full_tensor(t), whole)) << to_string(from) << " seed " << seed;
        const auto moved = redistribute(t, to);
        const auto wanted = to_local(distribute_tensor(whole, mesh, to, std::nullopt));
        ASSERT_TRUE(at::allclose(to_local(moved), wanted))
            << rows << ' ' << to_string(from) << "->" << to_string(to) << " seed " << seed << '\n'
            << str(moved) << wanted;
      }
    });
  }
}

TEST(Redistribute, FsdpOverTensorParallelGathersTheInnerShardFirst) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    for (const int64_t n : {0, 1, 3, 4, 5, 8, 9}) {
      // The mesh dim of tensor parallelism is sharded first. The mesh dim of data parallelism then shards each of these
      // shards.
      const at::Tensor whole = at::arange(n);
      const auto tp = local_range(n, 2, mesh->local_rank(1));
      const auto dp = local_range(tp.size, 2, mesh->local_rank(0));
      const at::Tensor mine = whole.narrow(0, std::min(n, tp.offset + dp.offset), dp.size);
      const auto t = from_local(mine.clone(), mesh, {StridedShard(0, 2), Shard(0)},
                                {.shape = std::vector<int64_t>{n}, .stride = std::vector<int64_t>{1}});
      EXPECT_TRUE(at::equal(full_tensor(t), whole)) << n;
      CommDebugMode count;
      const auto unsharded = redistribute(t, {Replicate(), Shard(0)});
      EXPECT_EQ(count.total(), tp.size > 0 ? 1 : 0);
      EXPECT_TRUE(at::equal(to_local(unsharded), whole.narrow(0, std::min(n, tp.offset), tp.size)));
      EXPECT_TRUE(at::equal(to_local(distribute_tensor(whole, mesh, {StridedShard(0, 2), Shard(0)})), mine)) << n;
    }
  });
}

TEST(Redistribute, UsesTheSameCollectivesAsPyTorch) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto shard = distribute_tensor(at::ones({4, 4}).set_requires_grad(true), mesh, {Shard(0)});
    const auto whole = distribute_tensor(at::ones({4, 4}).set_requires_grad(true), mesh, {Replicate()});
    {
      CommDebugMode count;
      const auto r = redistribute(shard, {Replicate()});
      EXPECT_EQ(count.all_gathers(), 1);
      EXPECT_EQ(count.total(), 1);
      CommDebugMode back;
      r.backward(distribute_tensor(at::ones({4, 4}), mesh, {Replicate()}, std::nullopt));
      EXPECT_EQ(back.total(), 0);
      EXPECT_EQ(placements(shard.grad())[0], Shard(0));
    }
    {
      CommDebugMode count;
      const auto s = redistribute(whole, {Shard(0)});
      EXPECT_EQ(count.total(), 0);
      s.backward(distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)}, std::nullopt));
      EXPECT_EQ(count.all_gathers(), 1);
      EXPECT_EQ(count.total(), 1);
    }
    {
      const auto part = from_local(at::ones({4}).set_requires_grad(true), mesh, {Partial()});
      CommDebugMode count;
      const auto r = redistribute(part, {Replicate()});
      EXPECT_EQ(count.all_reduces(), 1);
      r.backward(distribute_tensor(at::ones({4}), mesh, {Replicate()}, std::nullopt));
      EXPECT_EQ(count.total(), 1);
    }
  });
}

TEST(ToLocal, GradientsHaveTheRequestedPlacements) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto w = distribute_tensor(at::ones({4}).set_requires_grad(true), mesh, {Replicate()});
    (to_local(w, Placements{Partial()}) * (mesh->rank() + 1)).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({4}, 3.0)));
    const auto leaf = at::ones({2}).set_requires_grad(true);
    const auto sharded = from_local(leaf, mesh, {Shard(0)});
    (full_tensor(sharded) * at::arange(4)).sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad(), at::arange(2) + 2 * mesh->rank()));
    at::NoGradGuard no_grad;
    EXPECT_TRUE(to_local(w).is_same(to_local(w)));  // the local tensor that the DTensor holds
  });
}

// Regression test of a failure in the long conformance tests: a tensor of one element with any stride counts as
// contiguous, and still cannot be viewed as bytes.
TEST(Redistribute, AcceptsAnyStrideOfAOneElementShard) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor part = at::arange(4, at::kDouble).as_strided({1}, {3}, (*mesh->coordinate())[0]);
    const at::Tensor tensor = from_local(part, mesh, {Shard(0)}, {.shape = {{2}}, .stride = {{1}}});
    EXPECT_TRUE(at::equal(full_tensor(tensor), at::arange(2, at::kDouble)));
    EXPECT_TRUE(at::equal(to_local(redistribute(tensor, {Replicate()})), at::arange(2, at::kDouble)));
  });
}

TEST(Redistribute, FailedAsyncRedistributionFailsOnEveryUse) {
  int failures = 0;
  EXPECT_THROW(comm::run_thread_ranks(2,
                                      [&](const std::shared_ptr<comm::World>& world) {
                                        const auto mesh = init_device_mesh(world, "cpu", {2});
                                        const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
                                        if (world->rank() == 1) throw std::runtime_error("rank 1 gives up");
                                        const at::Tensor whole = redistribute(x, {Replicate()}, {.async_op = true});
                                        for (int i = 0; i < 3; ++i) {
                                          try {
                                            EXPECT_EQ((whole + i).numel(), 4);
                                          } catch (const Error&) {
                                            ++failures;
                                          }
                                        }
                                        throw std::runtime_error("rank 0 follows");
                                      }),
               std::exception);
  EXPECT_EQ(failures, 3);
}

}  // namespace
}  // namespace tessera
