// NCCL groups against plain computation, on machines with GPUs: CUDA tensors use NCCL, CPU tensors of the same group
// use Gloo.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/backends/nccl_backend.h"
#include "tessera/comm/collectives/collectives.h"
#include "tests/comm/fleet.h"

namespace tessera::comm {
namespace {

constexpr int kRanks = 2;

// Checks in processes that have no GoogleTest.
void require_equal(const at::Tensor& found, const at::Tensor& wanted) {
  TESSERA_CHECK(at::equal(found.cpu(), wanted), ErrorKind::kInternal, "[test] wrong result");
}

TEST(Nccl, CollectivesOfCudaTensorsEqualPlainComputation) {
  if (const auto reason = why_no_nccl(kRanks); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  Fleet fleet(kRanks, {.timeout = std::chrono::seconds(50)}, [](const auto& world) {
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(world->rank()));
    Group& group = *world->group(c10::DeviceType::CUDA);
    const at::Tensor own = at::full({4}, world->rank() + 1.0).to(device);
    at::Tensor sum = own.to(at::kBFloat16), all = at::empty({8}, own.options()), part = at::empty({2}, own.options());
    all_reduce(group, sum, ReduceOp::kAvg).wait();
    require_equal(sum, at::full({4}, 1.5, at::kBFloat16));
    all_gather_into(group, all, own).wait();
    require_equal(all, at::cat({at::full({4}, 1.0), at::full({4}, 2.0)}));
    reduce_scatter_into(group, part, own).wait();
    require_equal(part, at::full({2}, 3.0));
    broadcast(group, part.fill_(world->rank()), 1).wait();
    require_equal(part, at::ones({2}));
    at::Tensor on_cpu = at::ones({3});
    all_reduce(group, on_cpu).wait();
    require_equal(on_cpu, at::full({3}, 2.0));
    barrier(group);
  });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(fleet.end_of(rank).code, 0) << fleet.end_of(rank).text;
}

// The communication of pipelines (send to one rank) and of experts (uneven parts to all ranks).
TEST(Nccl, SendRecvAndUnevenAllToAllEqualPlainComputation) {
  if (const auto reason = why_no_nccl(kRanks); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  Fleet fleet(kRanks, {.timeout = std::chrono::seconds(50)}, [](const auto& world) {
    const int rank = world->rank(), other = 1 - rank;
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(rank));
    Group& group = *world->group(c10::DeviceType::CUDA);
    for (int step = 0; step < 3; ++step) {  // in both directions, as with micro-batches
      at::Tensor passed = at::full({5, 3}, 10.0 * step + rank).to(device), received = at::empty_like(passed);
      auto sent = send(group, passed, other, step), got = recv(group, received, other, step);
      got.wait();
      sent.wait();
      require_equal(received, at::full({5, 3}, 10.0 * step + other));
    }
    // Rank 0 sends 1 row to itself and 4 rows to rank 1. Rank 1 sends 2 rows to rank 0 and none to itself.
    const std::vector<int64_t> given = rank == 0 ? std::vector<int64_t>{1, 4} : std::vector<int64_t>{2, 0},
                               taken = rank == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{4, 0};
    const auto rows = at::arange(given[0] + given[1], at::kFloat).add_(100 * rank).unsqueeze(1).to(device);
    const auto out = at::empty({taken[0] + taken[1], 1}, rows.options());
    all_to_all_single(group, out, rows, taken, given).wait();
    require_equal(out.flatten(), rank == 0 ? at::tensor({0.F, 100.F, 101.F}) : at::tensor({1.F, 2.F, 3.F, 4.F}));
  });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(fleet.end_of(rank).code, 0) << fleet.end_of(rank).text;
}

// The second group of the same ranks is split from the first one's communicator, or makes its own communicator.
TEST(Nccl, SecondGroupsOfTheSameRanksWork) {
  if (const auto reason = why_no_nccl(kRanks); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  for (const bool split : {true, false}) {
    set_device_backend_settings({.high_priority_streams = true, .split_groups = split});
    Fleet fleet(kRanks, {.timeout = std::chrono::seconds(50)}, [](const auto& world) {
      const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(world->rank()));
      const auto second = world->group(c10::DeviceType::CUDA);
      const auto first = world->new_group({0, 1}, "second", c10::DeviceType::CUDA);
      for (const auto& group : {first, second, first}) {
        at::Tensor sum = at::ones({3}).to(device);
        all_reduce(*group, sum).wait();
        require_equal(sum, at::full({3}, 2.0));
      }
    });
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(fleet.end_of(rank).code, 0) << fleet.end_of(rank).text;
  }
  set_device_backend_settings({});
}

// Row and column groups of four ranks. Each group is split from the world's communicator in one call of all ranks, or
// makes its own communicator.
TEST(Nccl, GroupsOfMeshDimsWork) {
  if (const auto reason = why_no_nccl(4); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  for (const bool split : {true, false}) {
    set_device_backend_settings({.high_priority_streams = false, .split_groups = split});
    Fleet fleet(4, {.timeout = std::chrono::seconds(50)}, [](const auto& world) {
      const int rank = world->rank(), row = rank / 2, column = rank % 2;
      const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(rank));
      const auto of_row = world->new_group_by_split({2 * row, 2 * row + 1}, "row", c10::DeviceType::CUDA, row);
      const auto of_column = world->new_group_by_split({column, column + 2}, "column", c10::DeviceType::CUDA, column);
      for (int step = 0; step < 2; ++step) {
        at::Tensor over_row = at::full({3}, rank, at::kFloat).to(device), over_column = over_row.clone();
        all_reduce(*of_row, over_row).wait();
        all_reduce(*of_column, over_column).wait();
        require_equal(over_row, at::full({3}, 4.0 * row + 1, at::kFloat));
        require_equal(over_column, at::full({3}, 2.0 * column + 2, at::kFloat));
      }
    });
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(fleet.end_of(rank).code, 0) << fleet.end_of(rank).text;
  }
  set_device_backend_settings({});
}

}  // namespace
}  // namespace tessera::comm
