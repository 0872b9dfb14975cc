// The table of collectives: back-end x collective x dtype x operation x size. Each result is compared with a plain
// computation that every rank does for itself. The including tests choose the extent.
//
//   check_table(world, "gloo", Extent{.large_types = {at::kFloat}});       // COLLECTIVE over the world
//
// The table runs twice: through the interface that back-ends offer to c10d, and through Tessera's own collectives.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/backends/backend_choice.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/shm/shared_buffer.h"
#include "tests/support/ranks.h"

namespace tessera::comm::table {

using Red = c10d::ReduceOp::RedOpType;

// Cases with process ranks only: thread ranks read each other's memory in place without shared buffers.
inline std::vector<testing::RankCase> process_cases(const std::vector<int>& sizes) {
  std::vector<testing::RankCase> cases;
  for (const int size : sizes) cases.push_back({.size = size, .mode = testing::RankMode::kProcesses});
  return cases;
}

// While an object exists, all new CPU tensors but small ones are in memory that other ranks read in place.
class InSharedBuffers {
 public:
  InSharedBuffers() { c10::SetCPUAllocator(&shm::shared_buffers(), kPriority); }
  ~InSharedBuffers() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), kPriority); }
  InSharedBuffers(const InSharedBuffers&) = delete;
  InSharedBuffers& operator=(const InSharedBuffers&) = delete;

 private:
  static constexpr uint8_t kPriority = 255;
};

// Elements `begin` to `begin + count` of the input of rank `rank`.
inline at::Tensor data_of(int rank, int64_t count, at::ScalarType type, int64_t begin = 0) {
  const at::Tensor index = at::arange(begin, begin + count, at::kLong);
  if (type == at::kBool) return (index * 5 + rank * 3).remainder(3).to(type);
  return (index * 7 + rank * 3).remainder(5).to(type);
}

// The same elements, reduced rank by rank in a type that holds every intermediate result.
inline at::Tensor plainly_reduced(int size, int64_t count, at::ScalarType type, Red op, int64_t begin = 0) {
  const auto wide = at::isFloatingType(type) ? at::kDouble : type == at::kBool ? at::kBool : at::kLong;
  at::Tensor result = data_of(0, count, type, begin).to(wide);
  for (int rank = 1; rank < size; ++rank) {
    const at::Tensor part = data_of(rank, count, type, begin).to(wide);
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

inline bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

// Base of the checks of one rank: makes inputs and compares results.
class RankChecks {
 protected:
  RankChecks(int rank, int size) : rank_(rank), size_(size) {}
  void check(const at::Tensor& found, const at::Tensor& wanted, const char* what) const {
    EXPECT_TRUE(same(found, wanted)) << what << " " << where_ << ", rank " << rank_ << " of " << size_;
  }
  at::Tensor all_data(at::ScalarType type, int64_t count) const {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < size_; ++rank) parts.push_back(data_of(rank, count, type));
    return at::cat(parts);
  }

  int rank_, size_;
  std::string where_;
};

// Checks c10d's collectives of one back-end. Each call is for one dtype, size and operation.
class Checks : RankChecks {
 public:
  explicit Checks(c10d::Backend& backend)
      : RankChecks(backend.getRank(), backend.getSize()),
        backend_(backend),
        gloo_(backend.getBackendName() == "gloo") {}

  bool takes(at::ScalarType type, Red op) const {
    const bool bitwise = op == Red::BAND || op == Red::BOR || op == Red::BXOR;
    if (gloo_) {
      return op != Red::AVG && type != at::kShort && type != at::kBool && (!bitwise || !at::isFloatingType(type));
    }
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
    const at::Tensor part = plainly_reduced(size_, count, type, op, rank_ * count);
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

  bool moves_type(at::ScalarType type) const {
    return !gloo_ || (type != at::kShort && type != at::kBool && !at::isComplexType(type));
  }
  void moves(at::ScalarType type, int64_t count) {
    where_ = fmt::format("{} {} x {}", backend_.getBackendName(), c10::toString(type), count);
    gathers(type, count);
    from_and_to_root(type, count);
    all_to_all(type, count);
    messages(type, count);
  }

 private:
  void gathers(at::ScalarType type, int64_t count) {
    at::Tensor input = data_of(rank_, count, type), output = at::empty({count * size_}, type);
    backend_._allgather_base(output, input)->wait();
    check(output, all_data(type, count), "all_gather_base");
    output = at::empty({count * size_}, type);  // the input is part of the output
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

    // Rank r sends count + s rows to rank s, and none to rank 0.
    const auto rows = [&](int to) { return to == 0 ? 0 : count + to; };
    std::vector<int64_t> sent, received(size_, rows(rank_));
    int64_t total = 0;
    for (int to = 0; to < size_; ++to) sent.push_back(rows(to)), total += rows(to);
    at::Tensor uneven = data_of(rank_, total * 2, type).view({total, 2});
    at::Tensor got = at::empty({rows(rank_) * size_, 2}, type);
    backend_.alltoall_base(got, uneven, received, sent)->wait();
    wanted.clear();
    int64_t begin = 0;
    for (int to = 0; to < rank_; ++to) begin += rows(to);
    for (int rank = 0; rank < size_; ++rank) {
      wanted.push_back(data_of(rank, total * 2, type).view({total, 2}).narrow(0, begin, rows(rank_)));
    }
    check(got, at::cat(wanted), "all_to_all of uneven parts");
    if (gloo_) return;  // Gloo has no list form

    std::vector<at::Tensor> inputs, outputs;
    for (int to = 0; to < size_; ++to) {
      inputs.push_back(data_of(rank_ + to, rows(to), type));
      outputs.push_back(at::empty({rows(rank_)}, type));
    }
    backend_.alltoall(outputs, inputs)->wait();
    for (int from = 0; from < size_; ++from) {
      check(outputs[from], data_of(from + rank_, rows(rank_), type), "all_to_all of a list");
    }
  }

  // Sends and receives around the ring of ranks at the same time, with tags in opposite orders.
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
  bool gloo_;
};

// Checks Tessera's collectives over one group, which may have one rank.
class OwnChecks : RankChecks {
 public:
  OwnChecks(Group& group, const std::string& backend)
      : RankChecks(group.rank(), group.size()), group_(group), name_("tessera over " + backend) {}

  static bool takes(at::ScalarType type, ReduceOp op) {
    return type != at::kBool && type != at::kShort && (at::isFloatingType(type) || op != ReduceOp::kAvg);
  }

  void reductions(at::ScalarType type, int64_t count, ReduceOp op, Red same_op) {
    where_ = fmt::format("{} {} {} x {}", name_, c10::toString(type), to_string(op), count);
    at::Tensor tensor = data_of(rank_, count, type);
    all_reduce(group_, tensor, op).wait();
    check(tensor, plainly_reduced(size_, count, type, same_op), "all_reduce");
    at::Tensor input = data_of(rank_, count * size_, type), output = at::empty({count}, type);
    reduce_scatter_into(group_, output, input, op).wait();
    check(output, plainly_reduced(size_, count, type, same_op, rank_ * count), "reduce_scatter_into");
  }

  void moves(at::ScalarType type, int64_t count) {
    where_ = fmt::format("{} {} x {}", name_, c10::toString(type), count);
    const int root = size_ / 2;
    at::Tensor own = data_of(rank_, count, type), all = at::empty({count * size_}, type);
    all_gather_into(group_, all, own).wait();
    check(all, all_data(type, count), "all_gather_into");
    broadcast(group_, own, root).wait();
    check(own, data_of(root, count, type), "broadcast");
    std::vector<at::Tensor> parts;
    for (int to = 0; rank_ == root && to < size_; ++to) parts.push_back(data_of(to + 2, count, type));
    scatter(group_, own, parts, root).wait();
    check(own, data_of(rank_ + 2, count, type), "scatter");
    uneven_all_to_all(type, count);
    if (size_ == 1) return;
    at::Tensor got = at::empty({count}, type);
    PendingCollective sent = send(group_, own, (rank_ + 1) % size_);
    recv(group_, got, (rank_ + size_ - 1) % size_).wait();
    sent.wait();
    check(got, data_of((rank_ + size_ - 1) % size_ + 2, count, type), "recv");
  }

 private:
  // Rank r sends count + s rows to rank s.
  void uneven_all_to_all(at::ScalarType type, int64_t count) {
    std::vector<int64_t> sent, received(size_, count + rank_);
    int64_t total = 0, begin = 0;
    for (int to = 0; to < size_; ++to) {
      sent.push_back(count + to);
      if (to < rank_) begin += count + to;
      total += count + to;
    }
    at::Tensor output = at::empty({(count + rank_) * size_}, type);
    all_to_all_single(group_, output, data_of(rank_, total, type), received, sent).wait();
    std::vector<at::Tensor> wanted;
    for (int from = 0; from < size_; ++from) {
      wanted.push_back(data_of(from, total, type).narrow(0, begin, count + rank_));
    }
    check(output, at::cat(wanted), "all_to_all_single of uneven parts");
  }

  Group& group_;
  std::string name_;
};

constexpr at::ScalarType kReal[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte,
                                    at::kChar,  at::kShort,  at::kInt,  at::kLong,     at::kBool};
constexpr at::ScalarType kMoved[] = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                     at::kByte,  at::kChar,   at::kShort,        at::kInt,
                                     at::kLong,  at::kBool,   at::kComplexFloat, at::kComplexDouble};
constexpr Red kOperations[] = {Red::SUM, Red::AVG, Red::PRODUCT, Red::MIN, Red::MAX, Red::BAND, Red::BOR, Red::BXOR};
constexpr std::pair<ReduceOp, Red> kOwnOperations[] = {{ReduceOp::kSum, Red::SUM},
                                                       {ReduceOp::kAvg, Red::AVG},
                                                       {ReduceOp::kProduct, Red::PRODUCT},
                                                       {ReduceOp::kMin, Red::MIN},
                                                       {ReduceOp::kMax, Red::MAX}};

// The extent of the table: all dtypes and operations at every size of `sizes`, and the dtypes of `large_types` with the
// operations of `large_operations` at size kLarge, which takes several chunks.
struct Extent {
  std::vector<int64_t> sizes = {0, 1, 5, 1003};
  std::vector<at::ScalarType> large_types = {};
  std::vector<Red> large_operations = {Red::SUM};
};
constexpr int64_t kLarge = 300'001;  // several chunks in every type but the smallest

// Checks c10d's interface of one back-end. Gloo takes no empty tensors there.
inline void check_backend(c10d::Backend& backend, const Extent& extent) {
  Checks checks(backend);
  for (const int64_t count : extent.sizes) {
    if (count == 0 && backend.getBackendName() == "gloo") continue;
    for (const auto type : kReal) {
      for (const Red op : kOperations) {
        if (checks.takes(type, op)) checks.reductions(type, count, op);
      }
    }
    for (const auto type : kMoved) {
      if (checks.moves_type(type)) checks.moves(type, count);
    }
  }
  for (const auto type : extent.large_types) {
    for (const Red op : extent.large_operations) {
      if (checks.takes(type, op)) checks.reductions(type, kLarge, op);
    }
    if (checks.moves_type(type)) checks.moves(type, kLarge);
  }
}

inline void check_own(Group& group, const std::string& backend, const Extent& extent) {
  OwnChecks checks(group, backend);
  for (const int64_t count : extent.sizes) {
    for (const auto type : kReal) {
      for (const auto& [op, same_op] : kOwnOperations) {
        if (checks.takes(type, op)) checks.reductions(type, count, op, same_op);
      }
    }
    for (const auto type : kMoved) checks.moves(type, count);
  }
  for (const auto type : extent.large_types) {
    for (const auto& [op, same_op] : kOwnOperations) {
      const auto& wanted = extent.large_operations;
      if (std::ranges::find(wanted, same_op) == wanted.end()) continue;
      if (checks.takes(type, op)) checks.reductions(type, kLarge, op, same_op);
    }
    checks.moves(type, kLarge);
  }
}

inline void check_table(const std::shared_ptr<World>& world, const std::string& backend, const Extent& extent) {
  at::set_num_threads(1);  // the other ranks need the cores
  auto store = c10::make_intrusive<c10d::PrefixStore>("over-" + backend,
                                                      c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world->store()));
  const auto over = World::create(world->info(), store, {.backend = backend, .timeout = std::chrono::seconds(60)});
  const auto group = over->group();
  check_own(*group, backend, extent);
  if (world->size() > 1) {
    ASSERT_EQ(group->backend().getBackendName(), backend);
    check_backend(group->backend(), extent);
  } else {  // a group of one rank needs no back-end, but a back-end must take one rank too
    const auto alone = choose_backend(c10::make_intrusive<c10d::PrefixStore>("alone", store),
                                      {.requested = backend, .group = "alone", .ranks = {0}});
    ASSERT_EQ(alone->getBackendName(), backend);
    check_backend(*alone, extent);
  }
}

}  // namespace tessera::comm::table
