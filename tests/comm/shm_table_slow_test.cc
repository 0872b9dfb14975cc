// Every collective x dtype x operation x size, over shared memory and, where Gloo can, over Gloo, against a plain
// computation that each rank makes for itself.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/error.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using Red = c10d::ReduceOp::RedOpType;

constexpr at::ScalarType kReal[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                    at::kByte,  at::kChar,   at::kInt,  at::kLong};
constexpr Red kArithmetic[] = {Red::SUM, Red::AVG, Red::PRODUCT, Red::MIN, Red::MAX};
constexpr Red kBitwise[] = {Red::BAND, Red::BOR, Red::BXOR};
constexpr int64_t kSmall[] = {0, 1, 5, 1003};
constexpr int64_t kLarge = 700'001;  // several pieces in every type but the smallest

// A group over the same ranks, carried by `backend`.
std::shared_ptr<Group> group_over(const std::shared_ptr<World>& world, const std::string& backend,
                                  std::vector<std::shared_ptr<World>>& keep) {
  auto store = c10::make_intrusive<c10d::PrefixStore>("over-" + backend,
                                                      c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world->store()));
  keep.push_back(World::create(world->info(), store, {.backend = backend, .timeout = std::chrono::seconds(60)}));
  auto group = keep.back()->group();
  EXPECT_EQ(group->backend().getBackendName(), backend);
  return group;
}

at::Tensor data_of(int rank, int64_t count, at::ScalarType type) {
  if (type == at::kBool) return (at::arange(count, at::kLong) * 5 + rank * 3).remainder(3).to(type);
  return (at::arange(count, at::kLong) * 7 + rank * 3).remainder(5).to(type);
}

// In a type that holds every intermediate result, rank by rank.
at::Tensor plainly_reduced(int size, int64_t count, at::ScalarType type, Red op) {
  const auto wide = at::isFloatingType(type) ? at::kDouble : type == at::kBool ? at::kBool : at::kLong;
  at::Tensor result = data_of(0, count, type).to(wide);
  for (int rank = 1; rank < size; ++rank) {
    const at::Tensor part = data_of(rank, count, type).to(wide);
    switch (op) {
      case Red::SUM:
      case Red::AVG:
        result = wide == at::kBool ? result.logical_or(part) : result + part;
        break;
      case Red::PRODUCT:
        result = wide == at::kBool ? result.logical_and(part) : result * part;
        break;
      case Red::MIN:
        result = at::minimum(result, part);
        break;
      case Red::MAX:
        result = at::maximum(result, part);
        break;
      case Red::BAND:
        result = result.bitwise_and(part);
        break;
      case Red::BOR:
        result = result.bitwise_or(part);
        break;
      case Red::BXOR:
        result = result.bitwise_xor(part);
        break;
      default:
        ADD_FAILURE();
    }
  }
  if (op == Red::AVG) result = result / static_cast<double>(size);
  return result.to(type);
}

bool same(const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() == b.scalar_type() && at::equal(a, b); }

// The collectives of one back-end, each checked for one dtype, size and operation.
class Checks {
 public:
  Checks(Group& group, bool gloo) : backend_(group.backend()), rank_(group.rank()), size_(group.size()), gloo_(gloo) {}

  bool takes(at::ScalarType type, Red op) const {
    const bool bitwise = op == Red::BAND || op == Red::BOR || op == Red::BXOR;
    if (gloo_)
      return op != Red::AVG && type != at::kShort && type != at::kBool && (!bitwise || !at::isFloatingType(type));
    return at::isFloatingType(type) ? !bitwise : op != Red::AVG;
  }

  void reductions(at::ScalarType type, int64_t count, Red op) {
    where_ = fmt::format("{} {} {} x {}", backend_.getBackendName(), c10::toString(type), static_cast<int>(op), count);
    const at::Tensor wanted = plainly_reduced(size_, count, type, op);
    at::Tensor tensor = data_of(rank_, count, type);
    std::vector<at::Tensor> one = {tensor};
    c10d::AllreduceOptions all;
    all.reduceOp = op;
    backend_.allreduce(one, all)->wait();
    check(tensor, wanted, "all_reduce");

    c10d::ReduceOptions to_root;
    to_root.reduceOp = op;
    to_root.rootRank = size_ - 1;
    one = {data_of(rank_, count, type)};
    backend_.reduce(one, to_root)->wait();
    if (rank_ == size_ - 1) check(one[0], wanted, "reduce");
    if (!gloo_ && rank_ != size_ - 1) check(one[0], data_of(rank_, count, type), "reduce leaves the others' tensors");

    c10d::ReduceScatterOptions scattered;
    scattered.reduceOp = op;
    at::Tensor input = data_of(rank_, count * size_, type), output = at::empty({count}, type);
    const at::Tensor part = plainly_reduced(size_, count * size_, type, op).narrow(0, rank_ * count, count);
    backend_._reduce_scatter_base(output, input, scattered)->wait();
    check(output, part, "reduce_scatter_base");
    if (gloo_) return;
    std::vector<at::Tensor> outputs = {at::empty({count}, type)};
    std::vector<std::vector<at::Tensor>> parts = {input.chunk(size_)};
    if (count == 0) parts[0] = std::vector<at::Tensor>(size_, input);
    for (auto& one_part : parts[0]) one_part = one_part.clone();
    backend_.reduce_scatter(outputs, parts, scattered)->wait();
    check(outputs[0], part, "reduce_scatter");
  }

  void moves(at::ScalarType type, int64_t count) {
    where_ = fmt::format("{} {} x {}", backend_.getBackendName(), c10::toString(type), count);
    gathers(type, count);
    from_and_to_root(type, count);
    all_to_all(type, count);
    messages(type, count);
  }

 private:
  void check(const at::Tensor& found, const at::Tensor& wanted, const char* what) const {
    EXPECT_TRUE(same(found, wanted)) << what << " " << where_ << ", rank " << rank_ << " of " << size_;
  }
  at::Tensor all_data(at::ScalarType type, int64_t count) const {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < size_; ++rank) parts.push_back(data_of(rank, count, type));
    return at::cat(parts);
  }

  void gathers(at::ScalarType type, int64_t count) {
    at::Tensor input = data_of(rank_, count, type), output = at::empty({count * size_}, type);
    backend_._allgather_base(output, input)->wait();
    check(output, all_data(type, count), "all_gather_base");
    output = at::empty({count * size_}, type);  // in place
    at::Tensor own = output.narrow(0, rank_ * count, count);
    own.copy_(input);
    if (!gloo_) {
      backend_._allgather_base(output, own)->wait();
      check(output, all_data(type, count), "all_gather_base in place");
    }
    std::vector<std::vector<at::Tensor>> lists(1);
    for (int rank = 0; rank < size_; ++rank) lists[0].push_back(at::empty({count}, type));
    std::vector<at::Tensor> inputs = {input};
    backend_.allgather(lists, inputs)->wait();
    check(at::cat(lists[0]), all_data(type, count), "all_gather");
  }

  void from_and_to_root(at::ScalarType type, int64_t count) {
    const int root = size_ / 2;
    std::vector<at::Tensor> one = {data_of(rank_, count, type)};
    c10d::BroadcastOptions broadcast;
    broadcast.rootRank = root;
    backend_.broadcast(one, broadcast)->wait();
    check(one[0], data_of(root, count, type), "broadcast");

    c10d::ScatterOptions scatter;
    scatter.rootRank = root;
    std::vector<std::vector<at::Tensor>> lists;
    if (rank_ == root) {
      lists.emplace_back();
      for (int rank = 0; rank < size_; ++rank) lists[0].push_back(data_of(rank + 2, count, type));
    }
    std::vector<at::Tensor> output = {at::empty({count}, type)};
    backend_.scatter(output, lists, scatter)->wait();
    check(output[0], data_of(rank_ + 2, count, type), "scatter");

    c10d::GatherOptions gather;
    gather.rootRank = root;
    lists.clear();
    if (rank_ == root) {
      lists.emplace_back();
      for (int rank = 0; rank < size_; ++rank) lists[0].push_back(at::empty({count}, type));
    }
    std::vector<at::Tensor> input = {data_of(rank_, count, type)};
    backend_.gather(lists, input, gather)->wait();
    if (rank_ == root) check(at::cat(lists[0]), all_data(type, count), "gather");
  }

  void all_to_all(at::ScalarType type, int64_t count) {
    at::Tensor input = data_of(rank_, count * size_, type), output = at::empty({count * size_}, type);
    std::vector<int64_t> none;
    backend_.alltoall_base(output, input, none, none)->wait();
    std::vector<at::Tensor> wanted;
    for (int rank = 0; rank < size_; ++rank) {
      wanted.push_back(data_of(rank, count * size_, type).narrow(0, rank_ * count, count));
    }
    check(output, at::cat(wanted), "all_to_all");

    // Rank r sends count + s rows to rank s, and nothing to rank 0.
    const auto rows = [&](int to) { return to == 0 ? 0 : count + to; };
    std::vector<int64_t> sent, received(size_, rows(rank_));
    int64_t total = 0;
    for (int to = 0; to < size_; ++to) sent.push_back(rows(to)), total += rows(to);
    at::Tensor uneven = data_of(rank_, total * 2, type).view({total, 2});
    at::Tensor got = at::empty({rows(rank_) * size_, 2}, type);
    if (gloo_) return;
    backend_.alltoall_base(got, uneven, received, sent)->wait();
    wanted.clear();
    int64_t begin = 0;
    for (int to = 0; to < rank_; ++to) begin += rows(to);
    for (int rank = 0; rank < size_; ++rank) {
      wanted.push_back(data_of(rank, total * 2, type).view({total, 2}).narrow(0, begin, rows(rank_)));
    }
    check(got, at::cat(wanted), "all_to_all of uneven parts");

    std::vector<at::Tensor> inputs, outputs;
    for (int to = 0; to < size_; ++to) {
      inputs.push_back(data_of(rank_ + to, rows(to), type));
      outputs.push_back(at::empty({rows(rank_)}, type));
    }
    backend_.alltoall(outputs, inputs)->wait();
    for (int from = 0; from < size_; ++from)
      check(outputs[from], data_of(from + rank_, rows(rank_), type), "all_to_all of a list");
  }

  // Around the ring, all at once, tags in opposite orders.
  void messages(at::ScalarType type, int64_t count) {
    if (size_ == 1 || (gloo_ && count == 0)) return;
    const int next = (rank_ + 1) % size_, last = (rank_ + size_ - 1) % size_;
    std::vector<at::Tensor> first = {data_of(rank_, count, type)}, second = {data_of(rank_ + 1, count, type)};
    std::vector<at::Tensor> got_first = {at::empty({count}, type)}, got_second = {at::empty({count}, type)};
    const auto sent_first = backend_.send(first, next, 1), sent_second = backend_.send(second, next, 2);
    const auto last_second = backend_.recv(got_second, last, 2);
    last_second->wait();
    backend_.recv(got_first, last, 1)->wait();
    sent_first->wait();
    sent_second->wait();
    check(got_first[0], data_of(last, count, type), "recv");
    check(got_second[0], data_of(last + 1, count, type), "recv of the second tag");
  }

  c10d::Backend& backend_;
  int rank_, size_;
  bool gloo_;
  std::string where_;
};

void check_table(const std::shared_ptr<World>& world, const std::string& backend) {
  std::vector<std::shared_ptr<World>> keep;
  const auto group = group_over(world, backend, keep);
  const bool gloo = backend == "gloo";
  Checks checks(*group, gloo);
  const auto reductions = [&](at::ScalarType type, int64_t count, auto& ops) {
    for (const Red op : ops) {
      if (checks.takes(type, op)) checks.reductions(type, count, op);
    }
  };
  for (const int64_t count : kSmall) {
    if (gloo && count == 0) continue;
    for (const auto type : kReal) reductions(type, count, kArithmetic);
    for (const auto type : {at::kByte, at::kLong}) reductions(type, count, kBitwise);
    if (gloo) continue;
    reductions(at::kShort, count, kArithmetic);
    reductions(at::kBool, count, kArithmetic);
    reductions(at::kBool, count, kBitwise);
  }
  for (const int64_t count : kSmall) {
    if (gloo && count == 0) continue;
    for (const auto type : {at::kFloat, at::kByte, at::kLong}) checks.moves(type, count);
    if (gloo) continue;
    for (const auto type : {at::kHalf, at::kBFloat16, at::kBool, at::kComplexDouble}) checks.moves(type, count);
  }
  for (const auto type : {at::kFloat, at::kBFloat16, at::kLong}) {
    checks.reductions(type, kLarge, Red::SUM);
    if (checks.takes(type, Red::AVG)) checks.reductions(type, kLarge, Red::AVG);
  }
  for (const auto type : {at::kDouble, at::kByte}) checks.moves(type, kLarge);
}

TESSERA_RANKS_TEST(ShmTable, EqualsAPlainComputation, (2, 3, 4)) { check_table(world, "shm"); }
TESSERA_RANKS_TEST(GlooTable, EqualsAPlainComputation, (2, 3, 4)) { check_table(world, "gloo"); }

TESSERA_RANKS_TEST(ShmTable, HoldsForEightRanks, (8)) {
  Group& group = *world->group();
  ASSERT_EQ(group.backend().getBackendName(), "shm");
  Checks checks(group, false);
  for (const int64_t count : {int64_t{1}, int64_t{1003}, int64_t{150'001}}) {
    checks.reductions(at::kFloat, count, Red::SUM);
    checks.reductions(at::kBFloat16, count, Red::AVG);
    checks.moves(at::kFloat, count);
  }
}

// Sums whose value depends on the order: the order is that of the ranks, in float32, rounded once.
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
      EXPECT_TRUE(same(tensors[0], wanted)) << c10::toString(type) << " x " << count;
    }
  }
}

TESSERA_RANKS_TEST(ShmSums, NanAndInfinityAreKept, (3)) {
  c10d::Backend& backend = world->group()->backend();
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Red op : kArithmetic) {
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

TESSERA_RANKS_TEST(ShmForms, CoalescedAndAsynchronous, (2, 4)) {
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

TESSERA_RANKS_TEST(ShmForms, PollingCompletesWithoutWaiting, (2)) {
  c10d::Backend& backend = world->group()->backend();
  for (const int64_t count : {int64_t{1}, int64_t{1'000'000}}) {
    std::vector<at::Tensor> tensors = {at::ones({count})};
    const auto work = backend.allreduce(tensors);
    while (!work->isCompleted()) std::this_thread::yield();
    EXPECT_EQ(tensors[0][count - 1].item<float>(), 2.0F);
  }
}

TESSERA_RANKS_TEST(ShmForms, ReceivesFromAnyone, (3)) {
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

TESSERA_RANKS_TEST(ShmForms, ManyGroupsAtOnce, (4)) {
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
