// 72 processes in one shared-memory group: more than a machine word has bits.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tests/comm/shm_faults.h"

namespace tessera::comm {
namespace {

void require_equal(const at::Tensor& found, const at::Tensor& wanted, const char* what) {
  if (!at::equal(found, wanted)) throw std::runtime_error(what);
}

TEST(ShmMany, SeventyTwoProcessesShareOneGroup) {
  constexpr int kMany = 72;
  const auto body = [](const std::shared_ptr<World>& world) {
    Group& group = *world->group();
    if (group.backend().getBackendName() != "shm") throw std::runtime_error("not shm");
    const int64_t rank = world->rank();
    const at::Tensor all = at::arange(kMany, at::kLong), own = at::full({1}, rank, at::kLong);
    at::Tensor sum = at::full({5000}, rank + 1, at::kLong);
    all_reduce(group, sum).wait();
    require_equal(sum, at::full({5000}, kMany * (kMany + 1) / 2, at::kLong), "all_reduce");
    at::Tensor gathered = at::empty({kMany}, at::kLong);
    all_gather_into(group, gathered, own).wait();
    require_equal(gathered, all, "all_gather");
    at::Tensor part = at::empty({1}, at::kLong);
    reduce_scatter_into(group, part, all + rank).wait();
    require_equal(part, own * kMany + kMany * (kMany - 1) / 2, "reduce_scatter");
    at::Tensor exchanged = at::empty({kMany}, at::kLong);
    all_to_all_single(group, exchanged, all * kMany + rank).wait();
    require_equal(exchanged, own * kMany + all, "all_to_all");
    at::Tensor from_last = at::full({3}, rank, at::kLong);
    broadcast(group, from_last, kMany - 1).wait();
    require_equal(from_last, at::full({3}, kMany - 1, at::kLong), "broadcast");
    at::Tensor left = at::empty({1}, at::kLong);
    PendingCollective sent = send(group, own, static_cast<int>((rank + 1) % kMany));
    recv(group, left, static_cast<int>((rank + kMany - 1) % kMany)).wait();
    sent.wait();
    require_equal(left, at::full({1}, (rank + kMany - 1) % kMany, at::kLong), "recv");
    barrier(group);
  };
  const auto ends =
      testing_faults::run_forked(kMany, std::chrono::seconds(100), body, "shm", std::chrono::seconds(110));
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.message;
}

}  // namespace
}  // namespace tessera::comm
