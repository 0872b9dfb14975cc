#include "tessera/comm/shm/operation.h"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm::shm {
namespace {

const char* verb(CallKind kind) {
  switch (kind) {
    case CallKind::kNone:
      break;
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kReduce:
      return "reduce";
    case CallKind::kScatter:
      return "scatter";
    case CallKind::kGather:
      return "gather";
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kBarrier:
      return "barrier";
  }
  return "nothing";
}

bool reduces(CallKind kind) {
  return kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter || kind == CallKind::kReduce;
}

std::string describe(const Call& call) {
  std::string text = verb(call.kind);
  if (reduces(call.kind)) text += fmt::format("({})", name_of(static_cast<RedOp>(call.reduce)));
  if (call.root >= 0) text += fmt::format("(root {})", call.root);
  if (call.elements > 0) {
    text += call.dtype >= 0
                ? fmt::format(" of {} {}", call.elements, c10::toString(static_cast<c10::ScalarType>(call.dtype)))
                : fmt::format(" of {} bytes", call.elements);
  }
  return text;
}

constexpr size_t kBlock = 512 * 1024;

// Messages between each pair of ranks.
class Exchange final : public Operation {
 public:
  Exchange(const Call& call, std::vector<Outgoing> out, std::vector<Incoming> in, bool uniform)
      : Operation(call, static_cast<int>(out.size())), out_(std::move(out)), in_(std::move(in)), uniform_(uniform) {
    for (const auto& message : out_) longest_ = std::max(longest_, message.bytes);
    for (const auto& message : in_) received_ += message.bytes;
  }

  bool is_small(const Channel& channel) const override {
    return longest_ <= region(channel) && received_ <= 256 * 1024;
  }

 private:
  // Of a slot, for the messages to one rank.
  size_t region(const Channel& channel) const {
    const size_t slot = channel.layout().slot_data();
    return uniform_ ? slot : slot / size_ / 64 * 64;
  }

  void write_piece(const Channel& channel, const Slot& slot, size_t piece) const {
    const size_t region_bytes = region(channel), begin = piece * region_bytes;
    for (int to = 0; to < size_; ++to) {
      if (to == channel.rank() || begin >= out_[to].bytes) continue;
      const size_t bytes = std::min(region_bytes, out_[to].bytes - begin);
      std::memcpy(slot.data + (uniform_ ? 0 : to * region_bytes), out_[to].data + begin, bytes);
      if (uniform_) return;
    }
  }

  void read_piece(Channel& channel, size_t piece) const {
    const int rank = channel.rank();
    const size_t region_bytes = region(channel), begin = piece * region_bytes;
    for (int step = 1; step < size_; ++step) {
      const int from = (rank + step) % size_;
      if (begin >= in_[from].bytes) continue;
      const size_t bytes = std::min(region_bytes, in_[from].bytes - begin);
      std::memcpy(in_[from].data + begin, channel.slot(from).data + (uniform_ ? 0 : rank * region_bytes), bytes);
    }
  }

  void write_first(Channel& channel, const Slot& slot) override {
    slot.head->longest = longest_;
    for (int to = 0; to < size_; ++to) {
      slot.table[to].bytes = out_[to].bytes;
      slot.table[to].wanted = in_[to].bytes;
      if (to != channel.rank()) slot.head->outgoing = std::max<uint64_t>(slot.head->outgoing, out_[to].bytes);
    }
    slot.head->direct = slot.head->outgoing > region(channel) && show(channel, slot);
    if (!slot.head->direct) write_piece(channel, slot, 0);
  }

  bool show(const Channel& channel, const Slot& slot) const {
    for (int to = 0; to < size_; ++to) {
      if (to == channel.rank() || out_[to].bytes == 0) continue;
      const auto place = channel.show(out_[to].data, out_[to].bytes);
      if (!place) return false;
      slot.table[to].place = *place;
    }
    return true;
  }

  void run(Channel& channel, const Waiting& waiting) override {
    if (call_.kind == CallKind::kAllToAll) compare_sizes(channel);
    size_t longest = 0;
    for (int from = 0; from < size_; ++from) longest = std::max<size_t>(longest, channel.slot(from).head->longest);
    const InPlace way = in_place(channel, region(channel));
    if (way == InPlace::kAll) return read_directly(channel, waiting);
    if (way == InPlace::kSome) {
      write_piece(channel, channel.own_slot(), 0);
      meet(channel, waiting);
    }
    read_pieces(channel, waiting, longest);
  }

  // Of all pairs, so that every rank gets the same error.
  void compare_sizes(Channel& channel) const {
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        const uint64_t sent = channel.slot(from).table[to].bytes, wanted = channel.slot(to).table[from].wanted;
        if (sent == wanted) continue;
        throw Disagreement(
            fmt::format("{} sends {} bytes to {}, which wants {}. The splits of all ranks must fit together",
                        channel.name_of(from), sent, channel.name_of(to), wanted));
      }
    }
  }

  void read_pieces(Channel& channel, const Waiting& waiting, size_t longest) const {
    const size_t region_bytes = region(channel);
    const int rank = channel.rank();
    for (size_t piece = 0;; ++piece) {
      read_piece(channel, piece);
      const size_t begin = piece * region_bytes;
      if (begin < in_[rank].bytes && in_[rank].data != out_[rank].data) {  // piece by piece, while it is in the cache
        std::memcpy(in_[rank].data + begin, out_[rank].data + begin, std::min(region_bytes, in_[rank].bytes - begin));
      }
      if ((piece + 1) * region_bytes >= longest) return;
      write_piece(channel, channel.own_slot(), piece + 1);
      meet(channel, waiting);
    }
  }

  void read_directly(Channel& channel, const Waiting& waiting) const {
    const int rank = channel.rank();
    std::vector<const std::byte*> sources(size_);
    size_t longest = 0;
    for (int from = 0; from < size_; ++from) {
      const Slot slot = channel.slot(from);
      if (in_[from].bytes == 0) continue;
      longest = std::max(longest, in_[from].bytes);
      sources[from] = from == rank        ? out_[rank].data
                      : slot.head->direct ? channel.look(from, slot.table[rank].place, in_[from].bytes)
                                          : slot.data + (uniform_ ? 0 : rank * region(channel));
    }
    {
      Reading reading(channel);
      // In blocks, so that what one rank reads the others find in a cache.
      for (size_t begin = 0; begin < longest; begin += kBlock) {
        for (int step = 0; step < size_; ++step) {
          const int from = (rank + step) % size_;
          if (begin >= in_[from].bytes || sources[from] == in_[from].data) continue;
          std::memcpy(in_[from].data + begin, sources[from] + begin, std::min(kBlock, in_[from].bytes - begin));
        }
      }
      reading.end();
    }
    meet(channel, waiting);  // all have read
  }

  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
  bool uniform_;
  size_t longest_ = 0, received_ = 0;
};

// Names the first two ranks that differ, the same two on every rank.
void compare_calls(Channel& channel, int size) {
  const Slot first = channel.slot(0);
  for (int rank = 1; rank < size; ++rank) {
    const Slot other = channel.slot(rank);
    if (other.head->call == first.head->call) continue;
    throw Disagreement(
        fmt::format("{} calls {}, {} calls {}. All ranks of a group must make the same calls in the same order",
                    channel.name_of(0), describe(first.head->call), channel.name_of(rank), describe(other.head->call)));
  }
}

}  // namespace

void Operation::post(Channel& channel) {
  channel.forget_freed();
  const Slot slot = channel.own_slot();
  slot.head->call = call_;
  slot.head->signature = signature_;
  slot.head->longest = 0;
  slot.head->outgoing = 0;
  slot.head->direct = 0;
  write_first(channel, slot);
  channel.arrive();
}

Operation::InPlace Operation::in_place(Channel& channel, size_t fits) const {
  bool some = false, all = true;
  for (int rank = 0; rank < size_; ++rank) {
    const SlotHead& head = *channel.slot(rank).head;
    some = some || head.direct;
    all = all && (head.direct || head.outgoing <= fits);
  }
  return !some ? InPlace::kNone : all ? InPlace::kAll : InPlace::kSome;
}

void Operation::compare(Channel& channel) const {
  bool announced = true, differ = false;
  for (int rank = 0; rank < size_; ++rank) {
    const SlotHead& head = *channel.slot(rank).head;
    announced = announced && head.signature.hash != 0;
    differ = differ || head.signature.hash != signature_.hash;
  }
  if (announced && differ) {
    std::vector<SignedBy> calls;
    for (int rank = 0; rank < size_; ++rank) calls.emplace_back(rank, channel.slot(rank).head->signature);
    raise_disagreement(signature_.group, calls);
  }
  compare_calls(channel, size_);
}

void Operation::finish(Channel& channel, Patience patience, Clock::time_point deadline) {
  const Waiting waiting{patience, deadline};
  channel.wait(patience, deadline);
  compare(channel);
  run(channel, waiting);
}

std::unique_ptr<Operation> make_exchange(const Call& call, std::vector<Outgoing> out, std::vector<Incoming> in,
                                         bool uniform) {
  return std::make_unique<Exchange>(call, std::move(out), std::move(in), uniform);
}

}  // namespace tessera::comm::shm
