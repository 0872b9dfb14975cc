// The operations that only move bytes: all-gather, broadcast, scatter, gather, all-to-all and barrier.
#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"
#include "tessera/comm/shm/operation.h"

namespace tessera::comm::shm {
namespace {

constexpr size_t kBlock = 512 * 1024;  // bytes read in place per step

// Sends a message, possibly empty, from each rank to each rank, in one of three ways:
// - All messages fit their region of a slot: there is one round, and every rank reads the slots.
// - Some messages are longer, and every rank can show its long messages in place (Channel::show): the receivers read
//   them from the sender's memory in blocks, and one more round tells the senders that all have read.
// - Otherwise: the messages go piece by piece through the slots, with one round per piece.
class ExchangeOperation final : public Operation {
 public:
  ExchangeOperation(const CallDescriptor& call, std::vector<SendBuffer> out, std::vector<ReceiveBuffer> in,
                    bool uniform)
      : Operation(call, static_cast<int>(out.size())), out_(std::move(out)), in_(std::move(in)), uniform_(uniform) {
    for (const auto& message : out_) longest_ = std::max(longest_, message.bytes);
    for (const auto& message : in_) received_ += message.bytes;
  }

 private:
  // Returns whether all messages fit into the first round and at most kLittleWorkBytes bytes are left to copy after it
  // (Operation::ends_in_first_round). Returns false for every all-to-all: its ranks may have messages of different
  // sizes, and no rank knows the sizes of the others, so no rank can tell whether all messages fit.
  bool ends_in_first_round(const Channel& channel) const override {
    if (call_.kind == Op::kAllToAll) return false;
    const size_t element = call_.dtype >= 0 ? c10::elementSize(static_cast<c10::ScalarType>(call_.dtype)) : 1;
    return call_.elements * element <= region(channel) && received_ <= kLittleWorkBytes;
  }
  // Bytes of a slot for the message to one rank: the whole slot when all receive the same message.
  size_t region(const Channel& channel) const {
    const size_t slot = channel.layout().slot_data();
    return uniform_ ? slot : slot / size_ / 64 * 64;
  }

  void write_piece(const Channel& channel, const SlotView& slot, size_t piece) const {
    const size_t region_bytes = region(channel), begin = piece * region_bytes;
    for (int to = 0; to < size_; ++to) {
      if (to == channel.rank() || begin >= out_[to].bytes) continue;
      const size_t bytes = std::min(region_bytes, out_[to].bytes - begin);
      copy_bytes(slot.data + (uniform_ ? 0 : to * region_bytes), out_[to].data + begin, bytes);
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
      copy_bytes(in_[from].data + begin, channel.slot(from).data + (uniform_ ? 0 : rank * region_bytes), bytes);
    }
  }

  void write_first(Channel& channel, const SlotView& slot) override {
    slot.head->longest = longest_;
    for (int to = 0; to < size_; ++to) {
      slot.table[to].bytes = out_[to].bytes;
      slot.table[to].expected_bytes = in_[to].bytes;
      if (to != channel.rank()) slot.head->outgoing = std::max<uint64_t>(slot.head->outgoing, out_[to].bytes);
    }
    slot.head->direct = slot.head->outgoing > region(channel) && show(channel, slot);
    if (!slot.head->direct) write_piece(channel, slot, 0);
  }

  bool show(const Channel& channel, const SlotView& slot) const {
    for (int to = 0; to < size_; ++to) {
      if (to == channel.rank() || out_[to].bytes == 0) continue;
      const auto place = channel.show(out_[to].data, out_[to].bytes);
      if (!place) return false;
      slot.table[to].place = *place;
    }
    return true;
  }

  StepCoroutine run(Channel& channel) override {
    if (call_.kind == Op::kAllToAll) compare_sizes(channel);
    const InPlaceMode way = in_place(channel, region(channel));
    if (way == InPlaceMode::kAll) return read_in_place(channel);
    size_t longest = 0;
    for (int from = 0; from < size_; ++from) longest = std::max<size_t>(longest, channel.slot(from).head->longest);
    return read_pieces(channel, longest, way == InPlaceMode::kSome);
  }

  // Checks for each pair of ranks that one rank sends as many bytes as the other rank expects. Every rank checks all
  // pairs, not only the pairs with itself, so every rank throws the same error.
  void compare_sizes(Channel& channel) const {
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        const uint64_t sent = channel.slot(from).table[to].bytes,
                       expected = channel.slot(to).table[from].expected_bytes;
        if (sent == expected) continue;
        throw Disagreement(
            fmt::format("{} sends {} bytes to {}, which wants {}. The splits of all ranks must fit together",
                        channel.name_of(from), sent, channel.name_of(to), expected));
      }
    }
  }

  // Sends the messages piece by piece through the slots. `write_first`: some ranks have not written their first piece,
  // because they offered their messages for reading in place (Channel::show()), but other ranks could not offer their
  // messages. All ranks then write the first piece in an additional round.
  StepCoroutine read_pieces(Channel& channel, size_t longest, bool write_first) {
    const size_t region_bytes = region(channel);
    const int rank = channel.rank();
    const auto is_last = [&](size_t piece) { return (piece + 1) * region_bytes >= longest; };
    if (write_first) {
      write_piece(channel, channel.own_slot(), 0);
      co_await meet(channel, is_last(0));
    }
    for (size_t piece = 0;; ++piece) {
      read_piece(channel, piece);
      const size_t begin = piece * region_bytes;
      if (begin < in_[rank].bytes && in_[rank].data != out_[rank].data) {  // own part: while the piece is in the cache
        copy_bytes(in_[rank].data + begin, out_[rank].data + begin, std::min(region_bytes, in_[rank].bytes - begin));
      }
      if (is_last(piece)) co_return;
      write_piece(channel, channel.own_slot(), piece + 1);
      co_await meet(channel, is_last(piece + 1));
    }
  }

  StepCoroutine read_in_place(Channel& channel) {
    const int rank = channel.rank();
    std::vector<const std::byte*> sources(size_);
    size_t longest = 0;
    for (int from = 0; from < size_; ++from) {
      const SlotView slot = channel.slot(from);
      if (in_[from].bytes == 0) continue;
      longest = std::max(longest, in_[from].bytes);
      sources[from] = from == rank        ? out_[rank].data
                      : slot.head->direct ? channel.look(from, slot.table[rank].place, in_[from].bytes)
                                          : slot.data + (uniform_ ? 0 : rank * region(channel));
    }
    // The messages are read in blocks, so that a block that one rank has read is in a cache when the other ranks read
    // it.
    for (size_t begin = 0; begin < longest; begin += kBlock) {
      if (begin > 0) co_await pause();
      InPlaceRead reading(channel);
      for (int step = 0; step < size_; ++step) {
        const int from = (rank + step) % size_;
        if (begin >= in_[from].bytes || sources[from] == in_[from].data) continue;
        copy_bytes(in_[from].data + begin, sources[from] + begin, std::min(kBlock, in_[from].bytes - begin));
      }
      reading.end();
    }
    co_await meet(channel, true);  // after this round, senders may change or free their memory
  }

  std::vector<SendBuffer> out_;
  std::vector<ReceiveBuffer> in_;
  bool uniform_;
  size_t longest_ = 0, received_ = 0;
};

}  // namespace

std::unique_ptr<Operation> make_exchange(const CallDescriptor& call, std::vector<SendBuffer> out,
                                         std::vector<ReceiveBuffer> in, bool uniform) {
  return std::make_unique<ExchangeOperation>(call, std::move(out), std::move(in), uniform);
}

}  // namespace tessera::comm::shm
