// Tests DTensors in a fake world, of which only one rank exists in the process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "tessera/comm/backends/fake_backend.h"
#include "tessera/comm/collectives/collectives.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

TEST(FakeWorld, MeshAndMatmulWorkOnSixteenThousandRanks) {
  constexpr int kRank = 12345, kSize = 16384;
  const auto account = std::make_shared<comm::FakeCostAccount>();
  const auto world = comm::World::create_fake(kRank, kSize, account);
  const auto mesh = init_device_mesh(world, "cpu", {kSize / 8, 8}, {"dp", "tp"});
  EXPECT_EQ(mesh->size(), kSize);
  EXPECT_EQ((*mesh->coordinate())[0], kRank / 8);
  EXPECT_EQ((*mesh->coordinate())[1], kRank % 8);

  const at::NoGradGuard no_grad;
  const auto tp = mesh->slice({"tp"});
  const at::Tensor x = distribute_tensor(at::ones({4, 64}), tp, {Shard(1)}, std::nullopt);
  const at::Tensor w = distribute_tensor(at::ones({64, 16}), tp, {Shard(0)}, std::nullopt);
  EXPECT_EQ(account->total().calls, 0U);
  const at::Tensor y = redistribute(at::mm(x, w), {Replicate()});  // each element is a sum of 8 ones on each of 8 ranks
  EXPECT_TRUE(at::equal(to_local(y), at::full({4, 16}, 64.0F)));
  const auto cost = account->of(comm::Op::kAllReduce);
  EXPECT_EQ(cost.calls, 1U);
  EXPECT_EQ(cost.bytes, 4U * 16 * 4 * 2 * 7 / 8);
  EXPECT_GT(cost.microseconds, 6.6 + 14 * 0.6);
  EXPECT_EQ(account->total().calls, 1U);

  at::Tensor gradient = at::ones({3});
  comm::all_reduce(*mesh->group("dp"), gradient).wait();
  EXPECT_EQ(gradient[0].item<float>(), kSize / 8);
}

// Six ranks on hosts of four and two ranks. All ranks must take the same links for fast ones, or their plans differ.
TEST(FakeWorld, RanksOfDifferentHostsChooseTheSamePlan) {
  const at::NoGradGuard no_grad;
  std::set<std::string> choices;
  for (const int rank : {0, 3, 4, 5}) {
    const auto world = comm::World::create_fake(rank, 6, std::make_shared<comm::FakeCostAccount>(), /*local_size=*/4);
    const auto mesh = init_device_mesh(world, "cpu", {2, 3});
    std::string choice;
    for (const int64_t n : {64, 256, 1024}) {
      for (const Placements& a :
           {Placements{Shard(0), Shard(1)}, Placements{Shard(1), Shard(0)}, Placements{Shard(1), Shard(1)}}) {
        for (const Placements& b : {Placements{Shard(0), Shard(1)}, Placements{Shard(1), Shard(0)}}) {
          const auto spread = [&](const Placements& lie) {
            return distribute_tensor(at::zeros({n, n}), mesh, lie, std::nullopt);
          };
          choice += to_string(placements(at::mm(spread(a), spread(b)))) + " ";
        }
      }
    }
    choices.insert(choice);
  }
  EXPECT_EQ(choices.size(), 1U) << ::testing::PrintToString(choices);
}

}  // namespace
}  // namespace tessera
