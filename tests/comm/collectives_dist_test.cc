// Tessera's collectives, messages and groups against plain computations, their errors, and the end of thread ranks when
// one rank throws.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/support/prompt.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using testing::RankMode;

constexpr at::ScalarType kMoved[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte,        at::kChar,
                                     at::kShort, at::kInt,    at::kLong, at::kBool,     at::kComplexFloat};
constexpr at::ScalarType kReduced[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                       at::kByte,  at::kChar,   at::kInt,  at::kLong};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

// The input of rank `rank`. Every rank can make the inputs of all ranks.
at::Tensor data_of(int rank, at::IntArrayRef shape, at::ScalarType type) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  const auto values = (at::arange(count, at::kLong) * 7 + rank * 3).remainder(5);
  return values.to(type).view(shape).contiguous();
}

bool same(const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() == b.scalar_type() && at::equal(a, b); }

at::Tensor plainly_reduced(int size, at::IntArrayRef shape, at::ScalarType type, ReduceOp op) {
  const auto wide = at::isFloatingType(type) ? at::kDouble : at::kLong;
  at::Tensor result = data_of(0, shape, type).to(wide);
  for (int rank = 1; rank < size; ++rank) {
    const at::Tensor part = data_of(rank, shape, type).to(wide);
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) result = result + part;
    if (op == ReduceOp::kMin) result = at::minimum(result, part);
    if (op == ReduceOp::kMax) result = at::maximum(result, part);
    if (op == ReduceOp::kProduct) result = result * part;
  }
  if (op == ReduceOp::kAvg) result = result / static_cast<double>(size);
  return result.to(type);
}

template <class Check>
void for_each_reduction(const Check& check) {
  for (const auto type : kReduced) {
    for (const auto op : kOps) {
      if (op != ReduceOp::kAvg || at::isFloatingType(type)) check(type, op);
    }
  }
}

// Averages may differ by one rounding, because the back-end divides in its accumulation type. All else is equal.
bool close(const at::Tensor& found, const at::Tensor& wanted, ReduceOp op) {
  return op == ReduceOp::kAvg ? at::allclose(found, wanted, 1e-6, 0) : same(found, wanted);
}

TESSERA_RANKS_TEST(Collectives, AllReduceEqualsPlainReduction, (1, 2, 3, 4)) {
  for_each_reduction([&](at::ScalarType type, ReduceOp op) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {3, 5}, {0}}) {
      at::Tensor tensor = data_of(world->rank(), shape, type);
      all_reduce(*world->group(), tensor, op).wait();
      EXPECT_TRUE(close(tensor, plainly_reduced(world->size(), shape, type, op), op))
          << c10::toString(type) << " " << to_string(op) << " of " << at::IntArrayRef(shape) << "\n"
          << tensor;
    }
  });
}

TESSERA_RANKS_TEST(Collectives, ReduceScatterEqualsPlainReduction, (1, 2, 3, 4)) {
  const int size = world->size();
  for_each_reduction([&](at::ScalarType type, ReduceOp op) {
    const std::vector<int64_t> whole = {size * 2, 3};
    const at::Tensor input = data_of(world->rank(), whole, type), before = input.clone();
    at::Tensor output = at::zeros({2, 3}, type);
    reduce_scatter_into(*world->group(), output, input, op).wait();
    const at::Tensor wanted = plainly_reduced(size, whole, type, op).narrow(0, world->rank() * 2, 2);
    EXPECT_TRUE(close(output, wanted, op)) << c10::toString(type) << " " << to_string(op) << "\n"
                                           << output << "\n"
                                           << wanted;
    EXPECT_TRUE(same(input, before));
  });
}

TESSERA_RANKS_TEST(Collectives, ReduceScatterOfManyChunksAddsInRankOrder, (3)) {
  const int size = world->size();
  const int64_t part = (1 << 17) + 1001;
  const auto input_of = [&](int rank) {
    return (at::arange(part * size, at::kFloat) + static_cast<float>(rank)).sin_();
  };
  at::Tensor output = at::empty({part}, at::kFloat);
  for (int round = 0; round < 2; ++round) {  // the second one reuses the first one's scratch memory
    reduce_scatter_into(*world->group(), output, input_of(world->rank()), ReduceOp::kSum).wait();
    at::Tensor wanted = input_of(0).narrow(0, world->rank() * part, part).clone();
    for (int rank = 1; rank < size; ++rank) wanted += input_of(rank).narrow(0, world->rank() * part, part);
    EXPECT_TRUE(at::equal(output, wanted)) << round;
    output.zero_();
  }
}

TESSERA_RANKS_TEST(Collectives, AllGatherAcceptsAnyStrideOfOneElement, (2)) {
  const at::Tensor own = at::full({1, 1}, world->rank() + 1.0, at::kDouble).as_strided({1, 1}, {3, 3});
  at::Tensor all = at::empty({2, 1}, at::kDouble);
  all_gather_into(*world->group(), all, own).wait();
  EXPECT_TRUE(at::equal(all, at::arange(1, 3).to(at::kDouble).view({2, 1}))) << all;
}

TESSERA_RANKS_TEST(Collectives, HalfPrecisionIsSummedInFloat, (4)) {
  // 256 + 1 is 256 in bfloat16, so a sum in bfloat16 would lose every small term.
  const at::Tensor own = at::full({4}, world->rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
  at::Tensor reduced = own.clone(), part = at::empty({1}, at::kBFloat16);
  all_reduce(*world->group(), reduced).wait();
  reduce_scatter_into(*world->group(), part, own).wait();
  const float wanted = at::full({}, 259.0, at::kBFloat16).item<float>();
  ASSERT_NE(wanted, 256.0F);
  EXPECT_EQ(reduced[0].item<float>(), wanted);
  EXPECT_EQ(part[0].item<float>(), wanted);
}

TESSERA_RANKS_TEST(Collectives, DataMovementSupportsEveryDtype, (1, 2, 3, 4)) {
  const int size = world->size(), rank = world->rank(), root = size - 1;
  Group& group = *world->group();
  for (const auto type : kMoved) {
    SCOPED_TRACE(c10::toString(type));
    at::Tensor gathered = at::zeros({size, 2, 3}, type);
    all_gather_into(group, gathered, data_of(rank, {2, 3}, type)).wait();
    std::vector<at::Tensor> parts;
    for (int peer = 0; peer < size; ++peer) parts.push_back(data_of(peer, {2, 3}, type));
    EXPECT_TRUE(same(gathered, at::stack(parts)));

    at::Tensor sent = data_of(rank, {5}, type);
    broadcast(group, sent, root).wait();
    EXPECT_TRUE(same(sent, data_of(root, {5}, type)));

    at::Tensor own = at::zeros({2, 3}, type);
    scatter(group, own, rank == root ? parts : std::vector<at::Tensor>(), root).wait();
    EXPECT_TRUE(same(own, parts[rank]));

    at::Tensor exchanged = at::zeros({size, 3}, type);
    all_to_all_single(group, exchanged, data_of(rank, {size, 3}, type)).wait();
    for (int peer = 0; peer < size; ++peer) EXPECT_TRUE(same(exchanged[peer], data_of(peer, {size, 3}, type)[rank]));
  }
}

// Rank r sends (r + p) % 3 rows to rank p.
TESSERA_RANKS_TEST(Collectives, AllToAllWithUnevenSplits, (1, 3, 4)) {
  const int size = world->size(), rank = world->rank();
  const auto rows = [](int from, int to) { return static_cast<int64_t>((from + to) % 3); };
  std::vector<int64_t> out_splits, in_splits;
  int64_t out_rows = 0, in_rows = 0;
  std::vector<at::Tensor> wanted = {at::empty({0, 2}, at::kFloat)};
  for (int peer = 0; peer < size; ++peer) {
    out_splits.push_back(rows(peer, rank));
    in_splits.push_back(rows(rank, peer));
    out_rows += out_splits.back();
    in_rows += in_splits.back();
    wanted.push_back(at::full({rows(peer, rank), 2}, peer * 10.0 + rank, at::kFloat));
  }
  std::vector<at::Tensor> sent = {at::empty({0, 2}, at::kFloat)};
  for (int peer = 0; peer < size; ++peer) {
    sent.push_back(at::full({rows(rank, peer), 2}, rank * 10.0 + peer, at::kFloat));
  }
  at::Tensor output = at::zeros({out_rows, 2}, at::kFloat);
  all_to_all_single(*world->group(), output, at::cat(sent), out_splits, in_splits).wait();
  EXPECT_TRUE(at::equal(output, at::cat(wanted))) << output;
}

TESSERA_RANKS_TEST(Collectives, SendAndReceiveInARing, (2, 4)) {
  const int size = world->size(), rank = world->rank();
  at::Tensor received = at::zeros({7}, at::kBFloat16);
  PendingCollective in = recv(*world->group(), received, (rank + size - 1) % size, 5);
  PendingCollective out = send(*world->group(), data_of(rank, {7}, at::kBFloat16), (rank + 1) % size, 5);
  in.wait();
  out.wait();
  EXPECT_TRUE(same(received, data_of((rank + size - 1) % size, {7}, at::kBFloat16)));
}

TESSERA_RANKS_TEST(Collectives, AllGatherBytesAcceptsDifferentLengths, (1, 3)) {
  std::vector<std::string> wanted;
  for (int rank = 0; rank < world->size(); ++rank) {
    wanted.push_back(std::string(rank * 1000, static_cast<char>('a' + rank)));
  }
  EXPECT_EQ(all_gather_bytes(*world->group(), wanted[world->rank()]), wanted);
  EXPECT_EQ(all_gather_bytes(*world->group(), ""), std::vector<std::string>(world->size()));
  const int root = world->size() - 1;
  EXPECT_EQ(broadcast_bytes(*world->group(), world->rank() == root ? std::string_view("a\0b", 3) : "", root),
            std::string("a\0b", 3));
}

TESSERA_RANKS_TEST(Collectives, PendingCollectivesMayBeWaitedForOutOfOrder, (2, 4)) {
  Group& group = *world->group();
  for (int round = 0; round < 5; ++round) {
    at::Tensor sum = at::full({1000}, 1.0, at::kFloat), part = at::empty({10}, at::kFloat);
    const at::Tensor input = at::full({10 * world->size()}, 2.0, at::kFloat);
    PendingCollective first = all_reduce(group, sum);
    PendingCollective second = reduce_scatter_into(group, part, input);
    PendingCollective third = reduce_scatter_into(group, part, input);  // no scratch memory is left for this call
    third.wait();
    second.wait();
    first.wait();
    EXPECT_TRUE(first.done());
    EXPECT_EQ(sum[999].item<float>(), world->size());
    EXPECT_EQ(part[9].item<float>(), 2 * world->size());
  }
}

TESSERA_RANKS_TEST(Collectives, BarrierWaitsForLateRanks, (3)) {
  world->group();
  if (world->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    world->store().set("rank 1 came", std::vector<uint8_t>{1});
  }
  barrier(*world->group());
  EXPECT_TRUE(world->store().check({"rank 1 came"}));
}

// Allocates and overwrites memory of the size of a Group, so that the memory of a destroyed Group gets other contents.
void overwrite_freed_groups() {
  std::vector<std::unique_ptr<char[]>> taken;
  for (size_t bytes = sizeof(Group); bytes < sizeof(Group) + 64; bytes += 16) {
    for (int i = 0; i < 8; ++i) {
      taken.push_back(std::make_unique<char[]>(bytes));
      std::memset(taken.back().get(), 0x5a, bytes);
    }
  }
}

TESSERA_RANKS_TEST(Collectives, PendingCollectivesMayOutliveTheirGroup, (2)) {
  const int size = world->size(), rank = world->rank();
  for (const std::string check : {"timeout", "always"}) {
    auto store = c10::make_intrusive<c10d::PrefixStore>("outlived " + check,
                                                        c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world->store()));
    const auto over =
        World::create(world->info(), store, {.backend = "gloo", .timeout = std::chrono::seconds(60), .check = check});
    auto group = over->new_group({0, 1}, "short-lived");
    const at::Tensor parts = at::full({size, 1000}, 1.0F + static_cast<float>(rank)), sum = at::empty({1000});
    const at::Tensor sent = at::full({3}, static_cast<float>(rank)), got = at::empty({3});
    PendingCollective reduced = reduce_scatter_into(*group, sum, parts), sends = send(*group, sent, 1 - rank),
                      receives = recv(*group, got, 1 - rank);
    const std::weak_ptr<Group> gone = group;
    group.reset();
    ASSERT_TRUE(gone.expired());
    overwrite_freed_groups();
    reduced.wait();
    receives.wait();
    sends.wait();
    EXPECT_EQ(sum[999].item<float>(), 3);
    EXPECT_EQ(got[2].item<float>(), static_cast<float>(1 - rank));
    over->group();
    barrier(*over->group());
  }
}

// Counts the writes to the store. A file store never shrinks, so each write would take disk space for the whole run.
class WritesCounted : public c10d::PrefixStore {
 public:
  using c10d::PrefixStore::PrefixStore;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++writes;
    c10d::PrefixStore::set(key, value);
  }
  std::atomic<int> writes = 0;
};

TESSERA_RANKS_TEST(Collectives, CheckedMessagesWriteNothingToTheStore, (2)) {
  const auto store =
      c10::make_intrusive<WritesCounted>("counted", c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world->store()));
  const auto over =
      World::create(world->info(), store, {.backend = "gloo", .timeout = std::chrono::seconds(60), .check = "always"});
  Group& group = *over->group();
  barrier(group);
  const int before = store->writes;
  at::Tensor got = at::empty({3});
  for (int tag = 0; tag < 20; ++tag) {
    PendingCollective sent = send(group, at::full({3}, static_cast<float>(tag)), 1 - world->rank(), tag % 3);
    recv(group, got, 1 - world->rank(), tag % 3).wait();
    sent.wait();
    EXPECT_EQ(got[2].item<float>(), static_cast<float>(tag));
  }
  EXPECT_EQ(store->writes, before);
  try {
    send(group, got, 1 - world->rank(), 1 << 30).wait();
    ADD_FAILURE() << "a tag of 2^30 was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
  }
  barrier(group);
}

TESSERA_RANKS_TEST(Collectives, DestructorOfPendingCollectiveWaits, (2)) {
  at::Tensor sum = at::full({1 << 20}, 1.0, at::kFloat);
  { PendingCollective dropped = all_reduce(*world->group(), sum); }
  EXPECT_EQ(sum[(1 << 20) - 1].item<float>(), 2.0F);
}

TESSERA_RANKS_TEST(Collectives, OutputVersionCounterIncreasesByOne, (2)) {
  at::Tensor output = at::zeros({2}, at::kFloat);
  const auto before = output._version();
  all_gather_into(*world->group(), output, at::ones({1}, at::kFloat)).wait();
  EXPECT_EQ(output._version(), before + 1);
}

TESSERA_RANKS_TEST(Groups, SubsetsCommunicateIndependently, (4)) {
  const int rank = world->rank();
  const std::vector<int> ranks = rank % 2 ? std::vector<int>{3, 1} : std::vector<int>{0, 2};  // in any order
  const auto group = world->new_group(ranks, "dp");
  EXPECT_EQ(group->ranks()[group->rank()], rank);
  at::Tensor gathered = at::empty({2}, at::kLong);
  all_gather_into(*group, gathered, at::full({1}, rank, at::kLong)).wait();
  EXPECT_EQ(gathered[0].item<int64_t>(), ranks[0]);
  EXPECT_EQ(gathered[1].item<int64_t>(), ranks[1]);
  if (rank < 2) {  // ranks 2 and 3 do not call, and the name is used again
    const auto again = world->new_group({0, 1}, "dp"), and_again = world->new_group({0, 1}, "dp");
    at::Tensor sum = at::ones({1}, at::kLong);
    all_reduce(*and_again, sum).wait();
    all_reduce(*again, sum).wait();
    EXPECT_EQ(sum.item<int64_t>(), 4);
  }
  EXPECT_EQ(world->new_group({rank}, "alone")->size(), 1);
}

TESSERA_RANKS_TEST(Groups, NewGroupRefusesInvalidRanks, (2)) {
  EXPECT_THROW(world->new_group({0, 0, 1}, "x"), Error);
  EXPECT_THROW(world->new_group({0, 1, 2}, "x"), Error);
  EXPECT_THROW(world->new_group({1 - world->rank()}, "x"), Error);
}

TESSERA_RANKS_TEST(Collectives, InvalidArgumentsAreShapeErrorsBeforeCommunication, (2)) {
  Group& group = *world->group();
  const at::Tensor two = at::ones({2}, at::kFloat), three = at::ones({3}, at::kFloat);
  const auto refused = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kShape;
    }
    return false;
  };
  EXPECT_TRUE(refused([&] { all_gather_into(group, three, two); }));
  EXPECT_TRUE(refused([&] { reduce_scatter_into(group, two, three); }));
  EXPECT_TRUE(refused([&] { all_gather_into(group, at::ones({4}, at::kDouble), two); }));
  EXPECT_TRUE(refused([&] { all_reduce(group, at::ones({2, 2}).t()); }));
  EXPECT_TRUE(refused([&] { all_reduce(group, at::ones({2}, at::kLong), ReduceOp::kAvg); }));
  EXPECT_TRUE(refused([&] { all_reduce(group, at::ones({2}, at::kBool)); }));
  EXPECT_TRUE(refused([&] { broadcast(group, two, 2); }));
  EXPECT_TRUE(refused([&] { all_to_all_single(group, three, three); }));
  EXPECT_TRUE(refused([&] { all_to_all_single(group, three, three, {1, 2}, {4, -1}); }));
  EXPECT_TRUE(refused([&] { send(group, two, world->rank()); }));
  at::Tensor sum = at::ones({1});
  all_reduce(group, sum).wait();  // the group is still usable
  EXPECT_EQ(sum.item<float>(), 2.0F);
}

using testing::kPromptSeconds;

double seconds_until_error(int size, const std::function<void(const std::shared_ptr<World>&)>& body,
                           const std::string& wanted) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    run_thread_ranks(size, body);
    ADD_FAILURE() << "no rank failed";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find(wanted), std::string::npos) << error.what();
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(ThreadRanks, AThrowingRankEndsTheOthers) {
  EXPECT_LT(seconds_until_error(
                4,
                [](const auto& world) {
                  at::Tensor sum = at::ones({4});
                  all_reduce(*world->group(), sum).wait();
                  if (world->rank() == 2) throw std::runtime_error("rank 2 gives up");
                  all_reduce(*world->group(), sum).wait();
                },
                "rank 2 gives up"),
            kPromptSeconds);
}

TEST(ThreadRanks, AThrowingRankWithCollectivesInFlightEndsTheOthers) {
  EXPECT_LT(seconds_until_error(
                4,
                [](const auto& world) {
                  const auto pair =
                      world->new_group(world->rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3}, "pair");
                  at::Tensor sum = at::ones({4}), part = at::ones({2}), other = at::ones({4});
                  Group& everyone = *world->group();
                  PendingCollective first = all_reduce(everyone, sum);
                  if (world->rank() == 2) {
                    PendingCollective second = reduce_scatter_into(*pair, part, other);  // rank 3 never calls it
                    PendingCollective third = recv(*pair, sum, 1);
                    throw std::runtime_error("rank 2 gives up");
                  }
                  first.wait();
                  all_reduce(everyone, sum).wait();  // rank 2 never starts this call
                },
                "rank 2 gives up"),
            kPromptSeconds);
}

TEST(ThreadRanks, ARankThatThrowsBeforeItsGroupIsMadeEndsTheOthers) {
  EXPECT_LT(seconds_until_error(
                3,
                [](const auto& world) {
                  if (world->rank() == 0) throw std::runtime_error("rank 0 gives up");
                  world->group();
                },
                "rank 0 gives up"),
            kPromptSeconds);
}

TEST(ThreadRanks, ErrorOfSurvivorsNamesCollectiveAndCause) {
  std::string message;
  EXPECT_THROW(run_thread_ranks(2,
                                [&](const auto& world) {
                                  barrier(*world->group());  // all ranks are connected before rank 1 leaves
                                  if (world->rank() == 1) throw std::runtime_error("gives up");
                                  at::Tensor sum = at::ones({4});
                                  try {
                                    all_reduce(*world->group(), sum, ReduceOp::kSum, "model.norm").wait();
                                  } catch (const Error& error) {
                                    EXPECT_EQ(error.kind(), ErrorKind::kComm);
                                    message = error.what();
                                    throw;
                                  }
                                }),
               std::runtime_error);
  EXPECT_TRUE(message.starts_with("[comm.all_reduce] model.norm, group 'world' (rank 0 of 2), call 2: ")) << message;
  EXPECT_NE(message.find("A peer has ended or has aborted the group"), std::string::npos) << message;
}

TEST(World, SingleRankWorldNeedsNoPeers) {
  const auto world = World::single();
  at::Tensor tensor = at::full({2}, 3.0);
  all_reduce(*world->group(), tensor, ReduceOp::kAvg).wait();
  EXPECT_EQ(tensor[1].item<float>(), 3.0F);
  EXPECT_EQ(world->size(), 1);
}

}  // namespace
}  // namespace tessera::comm
