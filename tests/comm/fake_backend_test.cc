// A fake world of one rank: results as if all ranks had this rank's data, the counted calls, bytes and modelled times,
// and the checks of arguments.
#include "tessera/comm/backends/fake_backend.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {
namespace {

struct FakeRank {
  std::shared_ptr<FakeCostAccount> account = std::make_shared<FakeCostAccount>();
  std::shared_ptr<World> world;
  FakeRank(int rank, int size, int local_size = 8) : world(World::create_fake(rank, size, account, local_size)) {}
};

TEST(FakeWorld, CollectivesBehaveAsIfAllRanksHeldThisRanksData) {
  FakeRank fake(2, 4);
  Group& group = *fake.world->group();
  const at::Tensor own = at::arange(3, at::kFloat);
  at::Tensor sum = own.clone(), mean = own.to(at::kBFloat16), most = own.clone(), product = own.clone();
  all_reduce(group, sum).wait();
  all_reduce(group, mean, ReduceOp::kAvg).wait();
  all_reduce(group, most, ReduceOp::kMax).wait();
  all_reduce(group, product, ReduceOp::kProduct).wait();
  EXPECT_TRUE(at::equal(sum, own * 4));
  EXPECT_TRUE(at::equal(mean, own.to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(most, own));
  EXPECT_TRUE(at::equal(product, own.pow(4)));

  at::Tensor gathered = at::empty({12}), part = at::empty({3});
  all_gather_into(group, gathered, own).wait();
  EXPECT_TRUE(at::equal(gathered, own.repeat({4})));
  reduce_scatter_into(group, part, at::arange(12, at::kFloat)).wait();
  EXPECT_TRUE(at::equal(part, at::arange(6, 9, at::kFloat) * 4));  // the shard of rank 2

  at::Tensor received = at::ones({3}), exchanged = at::empty({5});
  scatter(group, received, {}, 0).wait();
  EXPECT_TRUE(at::equal(received, at::zeros({3})));
  all_to_all_single(group, exchanged, at::arange(4, at::kFloat), {1, 2, 1, 1}, {1, 1, 1, 1}).wait();
  EXPECT_TRUE(at::equal(exchanged, at::tensor({2.0F, 2.0F, 0.0F, 2.0F, 2.0F})));
  barrier(group);
  EXPECT_EQ(all_gather_bytes(group, "ab"), std::vector<std::string>(4, "ab"));
}

TEST(FakeWorld, CountsCallsBytesAndModelledTimePerOperation) {
  FakeRank fake(0, 8);
  Group& group = *fake.world->group();
  constexpr int64_t kCount = 1 << 20;  // 2 MiB of bfloat16 on each rank
  at::Tensor own = at::zeros({kCount}, at::kBFloat16), all = at::zeros({8 * kCount}, at::kBFloat16);
  all_gather_into(group, all, own).wait();
  reduce_scatter_into(group, own, all).wait();
  all_reduce(group, all).wait();
  const double gigabytes = 2.0 * kCount / (1024.0 * 1024.0 * 1024.0);
  for (const Op op : {Op::kAllGather, Op::kReduceScatter}) {
    const FakeCost cost = fake.account->of(op);
    EXPECT_EQ(cost.calls, 1U);
    EXPECT_EQ(cost.bytes, 7U * 2 * kCount);
    EXPECT_NEAR(cost.microseconds, 6.6 + 7 * 0.6 + 7 * gigabytes / 87.7 * 1e6, 1e-6);
  }
  const FakeCost reduced = fake.account->of(Op::kAllReduce);
  EXPECT_EQ(reduced.bytes, 14U * 2 * kCount);
  EXPECT_NEAR(reduced.microseconds, 6.6 + 14 * 0.6 + 14 * gigabytes / 87.7 * 1e6, 1e-6);
  EXPECT_EQ(fake.account->total().calls, 3U);
  EXPECT_EQ(fake.account->total().bytes, 28U * 2 * kCount);
}

TEST(FakeWorld, GroupsThatSpanHostsAreSlower) {
  FakeRank fake(0, 16);
  at::Tensor data = at::zeros({1 << 20});
  const auto time_of = [&](const std::vector<int>& ranks) {
    const double before = fake.account->total().microseconds;
    all_reduce(*fake.world->new_group(ranks, "some"), data).wait();
    return fake.account->total().microseconds - before;
  };
  const double gigabytes = 4.0 / 1024;
  EXPECT_NEAR(time_of({0, 7}), 6.6 + 2 * 0.6 + gigabytes / 87.7 * 1e6, 1e-6);
  EXPECT_NEAR(time_of({0, 8}), 6.6 + 2 * 2.7 + gigabytes / (87.7 * 0.22) * 1e6, 1e-6);
}

TEST(FakeWorld, NeedsNoMemoryForTensorsOnTheMetaDevice) {
  FakeRank fake(100, 1024);
  Group& group = *fake.world->group();
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kBFloat16);
  at::Tensor whole = at::empty({1024LL << 30}, meta), part = at::empty({1LL << 30}, meta);
  all_gather_into(group, whole, part).wait();
  reduce_scatter_into(group, part, whole).wait();
  all_reduce(group, part, ReduceOp::kAvg).wait();
  EXPECT_EQ(fake.account->of(Op::kAllGather).bytes, 1023ULL << 31);
}

TEST(FakeWorld, ChecksArgumentsLikeARealWorld) {
  FakeRank fake(1, 4);
  EXPECT_THROW(all_gather_into(*fake.world->group(), at::empty({7}), at::empty({2})), Error);
  EXPECT_THROW(fake.world->new_group({0, 2}, "x"), Error);
  EXPECT_THROW(World::create_fake(4, 4, fake.account), Error);
}

}  // namespace
}  // namespace tessera::comm
