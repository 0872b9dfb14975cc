// The engine of a shared-memory group alone: the time for which its lock is held, the order of messages, and the ranks
// that its errors name.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <latch>
#include <thread>

#include "tessera/comm/shm/engine.h"

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;

// One shared memory with an engine for each rank. The memory and the engines are in this process.
struct Ranks {
  explicit Ranks(int size) : memory(SharedMemory::create(Layout(size).bytes())) {
    initialize(*memory, size);
    ChannelOptions options;
    options.size = size;
    options.processes.assign(size, ::getpid());
    for (; options.rank < size; ++options.rank) {
      channels.push_back(std::make_shared<Channel>(memory, options));
      engines.push_back(std::make_shared<Engine>(channels.back()));
    }
  }
  RoundWords<Native>& round_words() const { return reinterpret_cast<Head*>(memory->data())->rounds; }

  std::shared_ptr<SharedMemory> memory;
  std::vector<std::shared_ptr<Channel>> channels;
  std::vector<std::shared_ptr<Engine>> engines;
};

c10::intrusive_ptr<CollectiveWork> work_of(const std::shared_ptr<Engine>& engine, std::unique_ptr<Operation> operation,
                                           std::chrono::milliseconds timeout = 60s) {
  return c10::make_intrusive<CollectiveWork>(engine, c10d::OpType::BARRIER, 1, std::move(operation), timeout,
                                             std::vector<at::Tensor>(), std::vector<at::Tensor>());
}

std::unique_ptr<Operation> barrier_of(int size) {
  return make_exchange({.kind = Op::kBarrier}, std::vector<SendBuffer>(size), std::vector<ReceiveBuffer>(size), true);
}

c10::intrusive_ptr<MessageWork> message_of(const std::shared_ptr<Engine>& engine, c10d::OpType type, int peer,
                                           const at::Tensor& tensor) {
  return c10::make_intrusive<MessageWork>(engine, type, peer, 0, tensor, 60s);
}

// A call that moves data until the test lets it end.
class Slow final : public Operation {
 public:
  Slow(std::latch& moves, std::latch& may_end)
      : Operation({.kind = Op::kBarrier}, 1), moves_(moves), may_end_(may_end) {}

 private:
  bool ends_in_first_round(const Channel&) const override { return true; }
  void write_first(Channel&, const SlotView&) override {}
  StepCoroutine run(Channel&) override {
    moves_.count_down();
    may_end_.wait();
    co_return;
  }
  std::latch &moves_, &may_end_;
};

TEST(ShmEngine, StartDoesNotWaitForARunningCall) {
  const Ranks ranks(1);
  const auto& engine = ranks.engines[0];
  std::latch moves(1), may_end(1);
  const auto slow = work_of(engine, std::make_unique<Slow>(moves, may_end)), next = work_of(engine, barrier_of(1));
  engine->start(slow);
  std::thread waits([&] { slow->wait(); });
  moves.wait();
  engine->start(next);
  EXPECT_FALSE(next->isCompleted());
  may_end.count_down();
  next->wait();
  waits.join();
  EXPECT_TRUE(slow->isSuccess() && next->isSuccess());
}

TEST(ShmMessages, SmallMessageDoesNotWaitForALargeOneOfAnotherRank) {
  const Ranks ranks(3);
  const at::Tensor large = at::ones({16 << 20}), small = at::ones({1});
  at::Tensor got_large = at::zeros({16 << 20}), got_small = at::zeros({1});
  std::vector<EndedWork> ended;
  std::vector<std::unique_ptr<Messages>> of;
  for (const auto& channel : ranks.channels) of.push_back(std::make_unique<Messages>(*channel));
  of[1]->add(message_of(ranks.engines[1], c10d::OpType::SEND, 0, large));
  of[2]->add(message_of(ranks.engines[2], c10d::OpType::SEND, 0, small));
  of[0]->add(message_of(ranks.engines[0], c10d::OpType::RECV, 1, got_large));
  of[0]->add(message_of(ranks.engines[0], c10d::OpType::RECV, 2, got_small));
  of[1]->move(ended);
  of[2]->move(ended);
  ASSERT_EQ(ended.size(), 1U);  // the small message has left its sender
  EXPECT_TRUE(of[0]->move(ended));
  EXPECT_EQ(ended.size(), 2U);  // the small message has arrived at its receiver
  EXPECT_EQ(got_small[0].item<float>(), 1);
  EXPECT_EQ(got_large[-1].item<float>(), 0);
  while (!of[0]->is_idle()) EXPECT_TRUE(of[0]->move(ended));
  EXPECT_EQ(got_large[-1].item<float>(), 1);
  EXPECT_TRUE(of[1]->move(ended));
  EXPECT_TRUE(of[1]->is_idle());
}

// The deadline of a message counts even while other messages move.
TEST(ShmMessages, LateMessageIsNamedWhileOthersProgress) {
  const Ranks ranks(3);
  Messages messages(*ranks.channels[0]);
  at::Tensor tensor = at::zeros({1});
  messages.add(c10::make_intrusive<MessageWork>(ranks.engines[0], c10d::OpType::RECV, 2, 5, tensor, 1s));
  const std::vector<bool> left(3);
  EXPECT_NO_THROW(messages.check(Clock::now(), left, true));
  try {
    messages.check(Clock::now() + 2s, left, true);
    ADD_FAILURE() << "no error";
  } catch (const TimedOut& error) {
    EXPECT_STREQ(error.what(), "timed out: recv from rank 2, tag 5: the other rank did not take part");
  }
}

std::string end_of(const c10::intrusive_ptr<CollectiveWork>& work) {
  try {
    work->wait();
  } catch (const TimedOut& error) {
    return error.what();
  }
  return "none";
}

// Rank 1 looks like a peer that is stopped in the middle of Rounds::arrive().
TEST(ShmEngine, RankStoppedDuringArrivalIsNamedAtTheDeadline) {
  const Ranks ranks(2);
  const auto work = work_of(ranks.engines[0], barrier_of(2), 300ms);
  ranks.engines[0]->start(work);
  ranks.round_words().arrivals.fetch_add(1);
  EXPECT_EQ(end_of(work), "timed out: rank 1 did not arrive");
}

// A wait ends at its deadline even if the words in shared memory show no missing rank.
TEST(ShmEngine, WaitTimesOutEvenIfNoRankIsMissing) {
  const Ranks ranks(2);
  const auto work = work_of(ranks.engines[0], barrier_of(2), 300ms);
  ranks.engines[0]->start(work);
  ranks.channels[0]->words(1).arrived.store(1);
  EXPECT_EQ(end_of(work), "timed out: a rank did not arrive");
}

}  // namespace
}  // namespace tessera::comm::shm
