// Groups over several hosts, pretended on this one: shared memory inside each, Gloo over the loopback between them.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/backend_choice.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/mixed_backend.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

// The ranks of `world` on pretended hosts.
std::unique_ptr<Group> group_on_hosts(const World& world, const std::vector<int>& host_of,
                                      std::chrono::seconds timeout = std::chrono::seconds(30)) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world.size(); ++rank) ranks.push_back(rank);
  std::string name = "hosts";
  for (const int host : host_of) name += fmt::format("-{}", host);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      name, c10::intrusive_ptr<c10d::Store>::reclaim_copy(&const_cast<World&>(world).store()));
  auto backend = choose_backend(store, {.group = name,
                                        .rank = world.rank(),
                                        .size = world.size(),
                                        .ranks = ranks,
                                        .ranks_on_host = world.size(),
                                        .host = fmt::format("host {}", host_of[world.rank()]),
                                        .timeout = timeout});
  return std::make_unique<Group>(name, ranks, world.rank(), std::move(backend));
}

at::Tensor data_of(int rank, int64_t count, at::ScalarType type) {
  return (at::arange(count, at::kLong) * 7 + rank * 3).remainder(5).to(type);
}

at::Tensor reduced(int size, int64_t count, at::ScalarType type, ReduceOp op) {
  at::Tensor result = data_of(0, count, type).to(at::kDouble);
  for (int rank = 1; rank < size; ++rank) {
    const auto part = data_of(rank, count, type).to(at::kDouble);
    result = op == ReduceOp::kMax ? at::maximum(result, part) : result + part;
  }
  return (op == ReduceOp::kAvg ? result / size : result).to(type);
}

void check_group(Group& group) {
  const int rank = group.rank(), size = group.size();
  for (const int64_t count : {int64_t{1}, int64_t{3}, int64_t{1003}, int64_t{40'001}}) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong}) {
      const std::string what = fmt::format("{} x {}, rank {}", c10::toString(type), count, rank);
      for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
        if (op == ReduceOp::kAvg && !at::isFloatingType(type)) continue;
        auto tensor = data_of(rank, count, type);
        all_reduce(group, tensor, op).wait();
        EXPECT_TRUE(at::equal(tensor, reduced(size, count, type, op))) << "all_reduce " << to_string(op) << " " << what;
        auto part = at::empty({count}, type);
        reduce_scatter_into(group, part, data_of(rank, count * size, type), op).wait();
        EXPECT_TRUE(at::equal(part, reduced(size, count * size, type, op).narrow(0, rank * count, count)))
            << "reduce_scatter " << to_string(op) << " " << what;
      }
      auto all = at::empty({size * count}, type);
      all_gather_into(group, all, data_of(rank, count, type)).wait();
      for (int from = 0; from < size; ++from) {
        EXPECT_TRUE(at::equal(all.narrow(0, from * count, count), data_of(from, count, type))) << "all_gather " << what;
      }
      for (int root = 0; root < size; ++root) {
        auto tensor = data_of(rank, count, type);
        broadcast(group, tensor, root).wait();
        EXPECT_TRUE(at::equal(tensor, data_of(root, count, type))) << "broadcast of " << root << " " << what;
      }
    }
  }
  auto sent = data_of(rank, 3 * size, at::kFloat), got = at::empty({3 * size}, at::kFloat);
  all_to_all_single(group, got, sent).wait();
  for (int from = 0; from < size; ++from) {
    EXPECT_TRUE(at::equal(got.narrow(0, 3 * from, 3), data_of(from, 3 * size, at::kFloat).narrow(0, 3 * rank, 3)));
  }
  auto message = at::empty({5}, at::kLong);
  auto receiving = recv(group, message, (rank + size - 1) % size, 1);
  auto sending = send(group, data_of(rank, 5, at::kLong), (rank + 1) % size, 1);
  receiving.wait();
  sending.wait();
  EXPECT_TRUE(at::equal(message, data_of((rank + size - 1) % size, 5, at::kLong)));
  barrier(group);
}

TESSERA_RANKS_TEST(MixedBackend, EqualsAPlainComputation, (4)) {
  for (const auto& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 0}}) {
    const auto group = group_on_hosts(*world, host_of);
    ASSERT_EQ(group->backend().getBackendName(), "mixed");
    check_group(*group);
  }
}

TESSERA_RANKS_TEST(MixedBackend, TakesThreeHosts, (6)) {
  const auto group = group_on_hosts(*world, {0, 1, 2, 0, 1, 2});
  ASSERT_EQ(group->backend().getBackendName(), "mixed");
  check_group(*group);
}

TESSERA_RANKS_TEST(MixedBackend, RunsCallsInTheirOrderWhileTheyAreWaitedForInAnother, (4)) {
  const auto group = group_on_hosts(*world, {0, 0, 1, 1});
  std::vector<at::Tensor> tensors;
  std::vector<Pending> calls;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(at::full({i % 3 == 0 ? 100'000 : 7}, i + 1.0));
    calls.push_back(all_reduce(*group, tensors.back()));
  }
  for (size_t i = calls.size(); i-- > 0;) {
    calls[i].wait();
    EXPECT_EQ(tensors[i][6].item<double>(), 4 * (i + 1.0));
  }
}

// Sums have one order: that of the ranks of a host, then that of the hosts.
TESSERA_RANKS_TEST(MixedBackend, AddsInAFixedOrder, (4)) {
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

TESSERA_RANKS_TEST(MixedBackend, LeavesUnevenHostsToGloo, (3)) {
  const auto group = group_on_hosts(*world, {0, 0, 1});
  ASSERT_EQ(group->backend().getBackendName(), "gloo");
  auto tensor = at::ones({10});
  all_reduce(*group, tensor).wait();
  EXPECT_EQ(tensor[9].item<double>(), 3);
}

// One rank breaks off in the middle: nobody waits for it until the timeout.
TEST(MixedBackend, EndsOnAllRanksWhenOneBreaksOff) {
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
