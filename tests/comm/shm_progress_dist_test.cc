// A collective in shared memory that was started makes progress by itself, whatever its rank waits for first.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/errors/timed_out.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

at::Tensor token() { return at::zeros({1}); }

// A collective of `bytes` to or from each rank, with the check of its result.
struct Started {
  PendingCollective pending;
  std::function<bool()> is_right;
};
using Start = Started (*)(Group&, int64_t bytes);

constexpr float kOfRank[] = {3, 5, 7, 11};
float value_of(int rank) { return kOfRank[rank % 4]; }
at::Tensor data_of(int rank, int64_t count) { return at::full({count}, value_of(rank)); }

bool holds(const at::Tensor& tensor, float value) { return tensor.eq(value).all().item<bool>(); }

float sum_of(int size) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value_of(rank);
  return sum;
}

Started start_all_reduce(Group& group, int64_t bytes) {
  const at::Tensor tensor = data_of(group.rank(), bytes / 4);
  return {all_reduce(group, tensor), [tensor, &group] { return holds(tensor, sum_of(group.size())); }};
}

Started start_reduce_scatter(Group& group, int64_t bytes) {
  const at::Tensor input = data_of(group.rank(), bytes / 4 * group.size()), output = at::empty({bytes / 4});
  return {reduce_scatter_into(group, output, input), [output, &group] { return holds(output, sum_of(group.size())); }};
}

Started start_all_gather(Group& group, int64_t bytes) {
  const at::Tensor input = data_of(group.rank(), bytes / 4), output = at::empty({group.size(), bytes / 4});
  return {all_gather_into(group, output, input), [output, &group] {
            bool right = true;
            for (int rank = 0; rank < group.size(); ++rank) right = right && holds(output[rank], value_of(rank));
            return right;
          }};
}

Started start_broadcast(Group& group, int64_t bytes) {
  const at::Tensor tensor = data_of(group.rank(), bytes / 4);
  return {broadcast(group, tensor, 0), [tensor] { return holds(tensor, value_of(0)); }};
}

Started start_scatter(Group& group, int64_t bytes) {
  const at::Tensor output = at::empty({bytes / 4});
  std::vector<at::Tensor> inputs;
  for (int rank = 0; group.rank() == 0 && rank < group.size(); ++rank) inputs.push_back(data_of(rank, bytes / 4));
  return {scatter(group, output, inputs, 0), [output, &group] { return holds(output, value_of(group.rank())); }};
}

// Only the data of rank 0 is long.
Started start_all_to_all(Group& group, int64_t bytes) {
  const int size = group.size();
  std::vector<int64_t> sent(size, group.rank() == 0 ? bytes / 4 : 1), received(size, 1);
  received[0] = bytes / 4;
  const at::Tensor input = data_of(group.rank(), sent[0] * size), output = at::empty({bytes / 4 + size - 1});
  return {all_to_all_single(group, output, input, received, sent),
          [output, bytes] { return holds(output.narrow(0, 0, bytes / 4), value_of(0)); }};
}

constexpr Start kAll[] = {start_all_reduce, start_reduce_scatter, start_all_gather,
                          start_broadcast,  start_scatter,        start_all_to_all};

// Rank 1 starts the call and first waits for a message. Rank 0 sends the message when its own call has ended.
void wait_for_a_message_first(Group& group, Start start, int64_t bytes) {
  Started started = start(group, bytes);
  if (group.rank() == 1) recv(group, token(), 0).wait();
  started.pending.wait();
  EXPECT_TRUE(started.is_right()) << bytes;
  if (group.rank() == 0) send(group, token(), 1).wait();
}

TESSERA_RANKS_TEST(ShmProgress, CollectiveProgressesWhileItsRankWaitsForAMessage, (2, 4)) {
  for (const Start start : kAll) {
    for (const int64_t kib : {1, 48, 96, 140, 200, 300, 600, 3000}) {
      wait_for_a_message_first(*world->group(), start, kib * 1024);
    }
  }
}

// With more than 16 ranks the slots have 64 KiB.
TEST(ShmProgress, BroadcastAndScatterToManyRanksProgressToo) {
  tessera::testing::run_ranks({.size = 17, .mode = tessera::testing::RankMode::kThreads},
                              [](const std::shared_ptr<World>& world) {
                                wait_for_a_message_first(*world->group(), start_broadcast, 100 * 1024);
                                wait_for_a_message_first(*world->group(), start_scatter, 5 * 1024);
                              });
}

// In the next two tests rank 0 continues its call only after a message from rank 1. Rank 1 sends the message later.
TESSERA_RANKS_TEST(ShmProgress, PollingDoesNotWaitForPeers, (2)) {
  Group& group = *world->group();
  for (const int64_t kib : {1, 96, 3000}) {
    Started started = start_all_reduce(group, kib * 1024);
    if (group.rank() == 0) {
      recv(group, token(), 1).wait();
    } else {
      for (int i = 0; i < 100; ++i) static_cast<void>(started.pending.done());
      send(group, token(), 0).wait();
    }
    started.pending.wait();
    EXPECT_TRUE(started.is_right());
  }
}

TESSERA_RANKS_TEST(ShmProgress, StartingTheNextCallDoesNotWaitForPeers, (2)) {
  Group& group = *world->group();
  for (const int64_t kib : {1, 96, 3000}) {
    std::vector<Started> started;
    for (int i = 0; i < 3; ++i) started.push_back(start_all_reduce(group, kib * 1024));
    if (group.rank() == 0) {
      recv(group, token(), 1).wait();
    } else {
      send(group, token(), 0).wait();
    }
    for (auto& one : started) {
      one.pending.wait();
      EXPECT_TRUE(one.is_right());
    }
  }
}

// Two threads of a rank wait for different calls. The thread that drives one call drives both.
TESSERA_RANKS_TEST(ShmProgress, WaitingThreadsProgressEachOthersCalls, (2)) {
  c10d::Backend& backend = world->group()->backend();
  const int rank = world->rank();
  for (int round = 0; round < 50; ++round) {
    std::vector<at::Tensor> sum = {at::full({round % 2 == 0 ? 10 : 300'000}, 1.0F)}, got = {token()}, sent = {token()};
    const auto received = backend.recv(got, 1 - rank, 3);
    const auto reduced = backend.allreduce(sum);
    std::thread other([&] { received->wait(); });
    if (rank == 1) reduced->wait();
    backend.send(sent, 1 - rank, 3)->wait();
    reduced->wait();
    other.join();
    EXPECT_TRUE(holds(sum[0], 2));
  }
}

// Sends a message around the ring of ranks, as one of the calls of the random mixes.
Started start_ring(Group& group, int64_t bytes) {
  const int size = group.size(), from = (group.rank() + size - 1) % size;
  const at::Tensor sent = data_of(group.rank(), bytes / 4), got = at::empty({bytes / 4});
  auto sends = std::make_shared<PendingCollective>(send(group, sent, (group.rank() + 1) % size, 1));
  return {recv(group, got, from, 1), [got, from, sends] {
            sends->wait();
            return holds(got, value_of(from));
          }};
}

// Each rank starts the same calls, and ends them in an order and with delays of its own.
void end_in_any_order(std::vector<Started>& calls, std::mt19937& own) {
  std::shuffle(calls.begin(), calls.end(), own);
  for (auto& call : calls) {
    const auto pace = own() % 4;
    if (pace == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    for (size_t looks = pace == 1 ? own() % 50 : 0; looks > 0; --looks) static_cast<void>(call.pending.done());
    if (pace == 2) {
      while (!call.pending.done()) std::this_thread::yield();
    }
    call.pending.wait();
    EXPECT_TRUE(call.is_right());
  }
}

TESSERA_RANKS_TEST(ShmProgress, RandomMixesOfCallsCompleteInAnyOrder, (2, 3)) {
  Group& group = *world->group();
  constexpr uint32_t kSeed = 20;
  std::mt19937 common(kSeed), own(kSeed + 1 + static_cast<uint32_t>(group.rank()));
  for (int round = 0; round < 40; ++round) {
    std::vector<Started> calls;
    for (size_t i = common() % 6 + 1; i > 0; --i) {
      const size_t which = common() % (std::size(kAll) + 2);
      const int64_t bytes = int64_t{4} << (common() % 19);
      calls.push_back((which < std::size(kAll) ? kAll[which] : start_ring)(group, bytes));
      if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
    }
    end_in_any_order(calls, own);
  }
}

// wait(t) ends after t, even if the worker drives the call.
TESSERA_RANKS_TEST(ShmProgress, WaitTimeoutMayBeShorterThanTheGroupTimeout, (2)) {
  const auto fails_late = [](const char* name, World& in, const auto& start) {
    const auto group = in.new_group({0, 1}, name);
    if (in.rank() == 1) {
      const auto work = start(group->backend());
      std::this_thread::sleep_for(50ms);
      EXPECT_THROW(work->wait(200ms), TimedOut);
      EXPECT_FALSE(work->isSuccess());
    }
    barrier(*in.group());
  };
  std::vector<at::Tensor> got = {token()}, sum = {at::ones({1'000'000})}, more = {at::ones({1'000'000})};
  fails_late("message", *world, [&](c10d::Backend& backend) { return backend.recv(got, 0, 0); });
  fails_late("collective", *world, [&](c10d::Backend& backend) { return backend.allreduce(sum); });
  fails_late("queued collective", *world, [&](c10d::Backend& backend) {
    backend.allreduce(sum);
    return backend.allreduce(more);
  });
}

}  // namespace
}  // namespace tessera::comm
