// Properties of collectives in shared memory that the table of collectives does not test: order and rounding of sums,
// coalesced and asynchronous forms.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tests/comm/collective_table.h"

namespace tessera::comm {
namespace {

using table::Red;

// The value of these sums depends on the order. The terms must be added in rank order in float32 and rounded once.
TESSERA_RANKS_TEST(ShmSums, AreInRankOrderAndRoundedOnce, (2, 3, 4)) {
  c10d::Backend& backend = world->group()->backend();
  const int size = world->size();
  for (const int64_t count : {int64_t{100}, int64_t{600'011}}) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < size; ++rank) {
        const at::Tensor index = at::arange(count, at::kDouble);
        parts.push_back((at::sin(index * (rank + 1)) * at::pow(10.0, (index + rank).remainder(4))).to(type));
      }
      at::Tensor wanted = parts[0].to(at::kFloat);
      for (int rank = 1; rank < size; ++rank) wanted = wanted + parts[rank].to(at::kFloat);
      wanted = wanted.to(type);
      std::vector<at::Tensor> tensors = {parts[world->rank()].clone()};
      backend.allreduce(tensors)->wait();
      EXPECT_TRUE(table::same(tensors[0], wanted)) << c10::toString(type) << " x " << count;
    }
  }
}

TESSERA_RANKS_TEST(ShmSums, NanAndInfinityPropagate, (3)) {
  c10d::Backend& backend = world->group()->backend();
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Red op : {Red::SUM, Red::AVG, Red::PRODUCT, Red::MIN, Red::MAX}) {
      at::Tensor tensor = at::tensor({1.0F, 2.0F, -1.0F, 1e30F}, at::kFloat);
      if (world->rank() == 1) tensor = at::tensor({nan, inf, -inf, 1e30F}, at::kFloat);
      std::vector<at::Tensor> tensors = {tensor.to(type)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      backend.allreduce(tensors, options)->wait();
      const at::Tensor found = tensors[0].to(at::kFloat);
      EXPECT_TRUE(std::isnan(found[0].item<float>())) << c10::toString(type) << static_cast<int>(op);
      EXPECT_EQ(found[1].item<float>(), op == Red::MIN ? 2.0F : inf);
      if (op == Red::SUM || op == Red::MIN) {
        EXPECT_EQ(found[2].item<float>(), -inf);
      }
    }
  }
}

TESSERA_RANKS_TEST(ShmCollectives, CoalescedAndAsynchronousCallsWork, (2, 4)) {
  c10d::Backend& backend = world->group()->backend();
  const int rank = world->rank(), size = world->size();
  for (const int64_t count : {int64_t{3}, int64_t{400'000}}) {
    std::vector<at::Tensor> sums, inputs, outputs, parts;
    for (int i = 0; i < 5; ++i) {
      sums.push_back(at::full({count}, rank + i, at::kFloat));
      inputs.push_back(at::full({count}, rank * 10 + i, at::kInt));
      outputs.push_back(at::empty({count * size}, at::kInt));
      parts.push_back(at::empty({count}, at::kInt));
    }
    const auto reduced = backend.allreduce_coalesced(sums);
    const auto gathered = backend.allgather_into_tensor_coalesced(outputs, inputs);
    const auto scattered = backend.reduce_scatter_tensor_coalesced(parts, outputs);
    backend.startCoalescing();
    std::vector<at::Tensor> sent = {at::full({count}, static_cast<float>(rank))}, got = {at::empty({count})};
    backend.send(sent, (rank + 1) % size, 0);
    backend.recv(got, (rank + size - 1) % size, 0);
    backend.barrier();
    const auto coalesced = backend.endCoalescing();
    coalesced->wait();
    scattered->wait();  // out of order
    gathered->wait();
    reduced->wait();
    EXPECT_TRUE(reduced->isCompleted() && reduced->isSuccess());
    EXPECT_EQ(got[0][count - 1].item<float>(), static_cast<float>((rank + size - 1) % size));
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(sums[i][count - 1].item<float>(), static_cast<float>(size * (size - 1) / 2 + size * i));
      EXPECT_EQ(outputs[i][count * (size - 1)].item<int>(), (size - 1) * 10 + i);
      EXPECT_EQ(parts[i][0].item<int>(), size * (rank * 10 + i));
    }
  }
}

TESSERA_RANKS_TEST(ShmCollectives, PollingCompletesWithoutWaiting, (2)) {
  c10d::Backend& backend = world->group()->backend();
  for (const int64_t count : {int64_t{1}, int64_t{1'000'000}}) {
    std::vector<at::Tensor> tensors = {at::ones({count})};
    const auto work = backend.allreduce(tensors);
    while (!work->isCompleted()) std::this_thread::yield();
    EXPECT_EQ(tensors[0][count - 1].item<float>(), 2.0F);
  }
}

TESSERA_RANKS_TEST(ShmCollectives, RecvFromAnySourceWorks, (3)) {
  c10d::Backend& backend = world->group()->backend();
  if (world->rank() > 0) {
    std::vector<at::Tensor> sent = {at::full({4}, static_cast<float>(world->rank()))};
    backend.send(sent, 0, 7)->wait();
    return;
  }
  double total = 0;
  for (int i = 1; i < 3; ++i) {
    std::vector<at::Tensor> got = {at::empty({4})};
    const auto work = backend.recvAnysource(got, 7);
    work->wait();
    EXPECT_EQ(got[0][3].item<float>(), static_cast<float>(work->sourceRank()));
    total += got[0][0].item<double>();
  }
  EXPECT_EQ(total, 3);
}

// A rank may destroy its group after its last call. Ranks that still wait for the end of the same call must not fail.
TESSERA_RANKS_TEST(ShmCollectives, GroupMayBeDestroyedRightAfterItsLastCall, (2, 4)) {
  const int rank = world->rank(), size = world->size();
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  for (int round = 0; round < 24; ++round) {
    const auto group = world->new_group(ranks, "short-lived");
    const int64_t count = round % 2 == 0 ? 3 : 100'000;
    at::Tensor tensor = at::full({count}, static_cast<float>(rank));
    if (round % 3 == 0) {
      all_reduce(*group, tensor).wait();
      ASSERT_EQ(tensor[count - 1].item<float>(), static_cast<float>(size * (size - 1) / 2));
    } else if (rank == round % size) {
      send(*group, tensor, (rank + 1) % size).wait();
    } else if (rank == (round + 1) % size) {
      recv(*group, tensor, (rank + size - 1) % size).wait();
      ASSERT_EQ(tensor[count - 1].item<float>(), static_cast<float>(round % size));
    }
  }
}

TESSERA_RANKS_TEST(ShmCollectives, ManyGroupsRunConcurrently, (4)) {
  std::vector<std::shared_ptr<Group>> groups;
  for (int i = 0; i < 6; ++i) groups.push_back(world->new_group({0, 1, 2, 3}, "many"));
  std::vector<at::Tensor> tensors;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 60; ++i) {
    tensors.push_back(at::full({i % 7 == 0 ? 200'000 : 10}, static_cast<float>(i)));
    std::vector<at::Tensor> one = {tensors.back()};
    works.push_back(groups[i % 6]->backend().allreduce(one));
  }
  for (int i = 59; i >= 0; --i) {
    works[i]->wait();
    EXPECT_EQ(tensors[i][9].item<float>(), 4.0F * i);
  }
}

}  // namespace
}  // namespace tessera::comm
