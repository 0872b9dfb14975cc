// Groups over several pretended hosts on this machine, against plain computations: shared memory inside each host, Gloo
// over loopback between them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/backends/backend_choice.h"
#include "tessera/comm/backends/hierarchical_backend.h"
#include "tessera/comm/collectives/collectives.h"
#include "tests/comm/collective_table.h"

namespace tessera::comm {
namespace {

// A group of all ranks of `world`. Rank r is on pretended host `host_of[r]`.
std::unique_ptr<Group> group_on_hosts(const World& world, const std::vector<int>& host_of,
                                      std::chrono::seconds timeout = std::chrono::seconds(30)) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world.size(); ++rank) ranks.push_back(rank);
  std::string name = "hosts";
  for (const int host : host_of) name += fmt::format("-{}", host);
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>(name, c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store()));
  auto backend = choose_backend(store, {.group = name,
                                        .rank = world.rank(),
                                        .size = world.size(),
                                        .ranks = ranks,
                                        .oversubscribed = world.info().cores_per_rank < 1,
                                        .host = fmt::format("host {}", host_of[world.rank()]),
                                        .timeout = timeout});
  return std::make_unique<Group>(name, ranks, world.rank(), std::move(backend));
}

// Checks the table of Tessera's collectives, and two cases that the table does not have: every root, and equal splits.
void check_group(Group& group) {
  table::check_own(group, "mixed", {.sizes = {1, 3, 1003, 40'001}});
  at::Tensor got = at::empty({3 * group.size()});
  all_to_all_single(group, got, table::data_of(group.rank(), 3 * group.size(), at::kFloat)).wait();
  for (int from = 0; from < group.size(); ++from) {
    EXPECT_TRUE(at::equal(got.narrow(0, 3 * from, 3), table::data_of(from, 3, at::kFloat, 3 * group.rank())));
  }
  for (int root = 0; root < group.size(); ++root) {
    for (const int64_t count : {int64_t{1}, int64_t{40'001}}) {
      at::Tensor tensor = table::data_of(group.rank(), count, at::kFloat);
      broadcast(group, tensor, root).wait();
      EXPECT_TRUE(at::equal(tensor, table::data_of(root, count, at::kFloat))) << "broadcast of " << root;
    }
  }
  barrier(group);
}

TESSERA_RANKS_TEST(HierarchicalBackend, EqualsAPlainComputation, (4)) {
  for (const auto& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 0}}) {
    const auto group = group_on_hosts(*world, host_of);
    ASSERT_EQ(group->backend().getBackendName(), "mixed");
    check_group(*group);
  }
}

TESSERA_RANKS_TEST(HierarchicalBackend, SupportsThreeHosts, (6)) {
  const auto group = group_on_hosts(*world, {0, 1, 2, 0, 1, 2});
  ASSERT_EQ(group->backend().getBackendName(), "mixed");
  check_group(*group);
}

TESSERA_RANKS_TEST(HierarchicalBackend, RunsCallsInOrderWhenWaitedForInReverse, (4)) {
  const auto group = group_on_hosts(*world, {0, 0, 1, 1});
  std::vector<at::Tensor> tensors;
  std::vector<PendingCollective> calls;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(at::full({i % 3 == 0 ? 100'000 : 7}, i + 1.0));
    calls.push_back(all_reduce(*group, tensors.back()));
  }
  for (size_t i = calls.size(); i-- > 0;) {
    calls[i].wait();
    EXPECT_EQ(tensors[i][6].item<double>(), 4 * (i + 1.0));
  }
}

// Sums are added in a fixed order: first the ranks of each host in rank order, then the hosts.
TESSERA_RANKS_TEST(HierarchicalBackend, AddsInAFixedOrder, (4)) {
  const auto group = group_on_hosts(*world, {0, 0, 1, 1});
  const auto part = [](int rank) {
    return at::sin(at::arange(30'000, at::kFloat) * (rank + 1)) * std::pow(10.0F, rank);
  };
  const auto wanted = (part(0) + part(1)) + (part(2) + part(3));
  for (int again = 0; again < 3; ++again) {
    auto tensor = part(world->rank());
    all_reduce(*group, tensor).wait();
    EXPECT_TRUE(at::equal(tensor, wanted));
  }
}

TESSERA_RANKS_TEST(HierarchicalBackend, UsesGlooForHostsWithDifferentRankCounts, (3)) {
  const auto group = group_on_hosts(*world, {0, 0, 1});
  ASSERT_EQ(group->backend().getBackendName(), "gloo");
  auto tensor = at::ones({10});
  all_reduce(*group, tensor).wait();
  EXPECT_EQ(tensor[9].item<double>(), 3);
}

// Rank 2 aborts the group. The other ranks must fail before the timeout.
TEST(HierarchicalBackend, AbortOnOneRankFailsAllRanks) {
  const auto begin = std::chrono::steady_clock::now();
  testing::run_ranks({.size = 4, .mode = testing::RankMode::kThreads}, [](const std::shared_ptr<World>& world) {
    const auto group = group_on_hosts(*world, {0, 0, 1, 1}, std::chrono::seconds(60));
    auto tensor = at::ones({1000});
    all_reduce(*group, tensor).wait();
    if (world->rank() == 2) return group->abort();
    try {
      for (int i = 0; i < 3; ++i) all_reduce(*group, tensor).wait();
      ADD_FAILURE() << "rank " << world->rank() << " went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kComm) << error.what();
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace tessera::comm
