// The operations that compute: all-reduce, reduce and reduce-scatter.
#include <algorithm>

#include "tessera/base/files/copy_bytes.h"
#include "tessera/comm/shm/operation.h"

namespace tessera::comm::shm {
namespace {

constexpr size_t kReduceAllBytes = 128 * 1024;  // bytes of all ranks together, up to which each rank reduces everything
constexpr size_t kPartInCache = 1024 * 1024;    // bytes of a block that one rank reduces

class Reduction : public Operation {
 public:
  Reduction(const CallDescriptor& call, int size, size_t count)
      : Operation(call, size),
        type_(static_cast<c10::ScalarType>(call.dtype)),
        op_(static_cast<RedOp>(call.reduce)),
        element_(c10::elementSize(type_)),
        count_(count),
        bytes_(count * element_) {}

 protected:
  // The range of rank `part` when `count` elements are divided among the ranks in whole cache lines.
  struct ElementRange {
    size_t begin, count;
  };
  ElementRange part_of(size_t count, int part) const {
    const size_t line = 64 / element_;
    const size_t each = (count / size_ + line - 1) / line * line;
    const size_t begin = std::min(count, each * part);
    return {begin, part == size_ - 1 ? count - begin : std::min(count, begin + each) - begin};
  }
  // Fills this rank's slot for the first round. If this rank's data are larger than `fits` bytes and the other ranks
  // can read them in place, show() writes to slot.table where the data are. Otherwise write_piece() writes the first
  // piece of the data to the slot.
  void start(Channel& channel, const SlotView& slot, size_t fits) {
    slot.head->longest = slot.head->outgoing = bytes_;
    slot.head->direct = bytes_ > fits && show(channel, slot);
    if (!slot.head->direct) write_piece(channel, slot, 0);
  }
  // Writes to the slot's table the places of this rank's data that the other ranks read in place (Channel::show).
  // Returns false when the data cannot be read in place.
  virtual bool show(const Channel& channel, const SlotView& slot) const = 0;
  // Takes the piece of this rank's data that begins with element `begin`, and copies to `slot`, this rank's own slot,
  // what the other ranks need of this piece.
  virtual void write_piece(const Channel& channel, const SlotView& slot, size_t begin) const = 0;

  // Returns for each rank r the address at which this rank reads the data of rank r. show() on rank r has written the
  // place of these data to the table of rank r's slot, into the entry for this rank. Channel::look() maps the place to
  // an address. For this rank itself the address is `own`.
  std::vector<const std::byte*> shown_to(Channel& channel, const std::byte* own) const {
    std::vector<const std::byte*> places;
    for (int rank = 0; rank < size_; ++rank) {
      const SlotView slot = channel.slot(rank);
      places.push_back(rank == channel.rank() ? own : channel.look(rank, slot.table[channel.rank()].place, bytes_));
    }
    return places;
  }
  // Reduces the data of all ranks into `out`, block by block. The data of each rank are read at the address that
  // shown_to() returns for this rank. `own` is the address of this rank's own data.
  StepCoroutine reduce_in_place(Channel& channel, std::byte* out, const std::byte* own) {
    const auto places = shown_to(channel, own);
    for (size_t begin = 0; begin < count_; begin += kPartInCache / element_) {
      if (begin > 0) co_await pause();
      std::vector<const void*> sources;
      for (const auto* place : places) sources.push_back(place + begin * element_);
      InPlaceRead reading(channel);
      reduce_into(out + begin * element_, sources, std::min(kPartInCache / element_, count_ - begin));
      reading.end();
    }
    co_await meet(channel, true);
  }
  void reduce_into(void* out, const std::vector<const void*>& sources, size_t count) const {
    reduce(out, sources, count, type_, op_);
  }

  c10::ScalarType type_;
  RedOp op_;
  size_t element_, count_, bytes_;
};

// All-reduce, and reduce to a root (`to_root_`), in which only the root computes and keeps the result
// (`keeps_result_`).
class AllReduce final : public Reduction {
 public:
  AllReduce(const CallDescriptor& call, int size, void* data, size_t count, bool keeps_result, bool to_root)
      : Reduction(call, size, count),
        data_(static_cast<std::byte*>(data)),
        keeps_result_(keeps_result),
        to_root_(to_root) {}

 private:
  bool ends_in_first_round(const Channel& channel) const override {
    return !shared() && bytes_ <= channel.layout().slot_data() &&
           (!keeps_result_ || bytes_ * size_ <= kLittleWorkBytes);
  }

  size_t piece(const Channel& channel) const { return channel.layout().slot_data() / element_; }

  void write_first(Channel& channel, const SlotView& slot) override {
    start(channel, slot, channel.layout().slot_data());
  }

  bool show(const Channel& channel, const SlotView& slot) const override {
    const auto place = channel.show(data_, bytes_);
    for (int to = 0; place && to < size_; ++to) slot.table[to].place = *place;
    return place.has_value();
  }

  StepCoroutine run(Channel& channel) override {
    const InPlaceMode way = in_place(channel, channel.layout().slot_data());
    if (way != InPlaceMode::kAll) return by_pieces(channel, way == InPlaceMode::kSome);
    if (!to_root_) return all_in_place(channel);
    return keeps_result_ ? reduce_in_place(channel, data_, data_) : only_meet(channel);
  }

  // Each piece takes one round if every rank reduces the whole piece, and two rounds if the work is shared: after the
  // first round each rank reduces its part of the piece, and after the second it copies the reduced parts of the other
  // ranks.
  StepCoroutine by_pieces(Channel& channel, bool write_first) {
    const auto is_last = [&](size_t begin) { return begin + piece(channel) >= count_; };
    if (write_first) {
      write_piece(channel, channel.own_slot(), 0);
      co_await meet(channel, is_last(0) && !shared());
    }
    for (size_t begin = 0; begin < count_; begin += piece(channel)) {
      const size_t count = std::min(piece(channel), count_ - begin);
      if (begin > 0) {
        write_piece(channel, channel.own_slot(), begin);
        co_await meet(channel, is_last(begin) && !shared());
      }
      if (shared()) {
        reduce_part(channel, begin, count);
        co_await meet(channel, is_last(begin));
        fetch_parts(channel, begin, count);
      } else if (keeps_result_) {
        reduce_into(data_ + begin * element_, contributions(channel, begin, 0), count);
      }
    }
  }

  // Whether each rank reduces only its part of a piece and fetches the other parts.
  bool shared() const { return !to_root_ && bytes_ * size_ > kReduceAllBytes; }

  // Writes this rank's elements of a piece to its slot. If shared() is true, the part of the piece that this rank
  // itself reduces is not written to the slot: only this rank reads that part, directly from its own tensor. The root
  // of a reduce writes nothing, for the same reason.
  void write_piece(const Channel& channel, const SlotView& slot, size_t begin) const override {
    if (to_root_ && keeps_result_) return;
    const size_t count = std::min(piece(channel), count_ - begin);
    const ElementRange own = shared() ? part_of(count, channel.rank()) : ElementRange{count, 0};
    const size_t behind = own.begin + own.count;
    const auto write = [&](size_t from, size_t to) {
      copy_bytes(slot.data + from * element_, data_ + (begin + from) * element_, (to - from) * element_);
    };
    write(0, own.begin);
    write(behind, count);
  }

  // Returns, by rank, the address of element `offset` of the piece that begins with element `begin`: in the slots of
  // the other ranks, and in this rank's own tensor.
  std::vector<const void*> contributions(Channel& channel, size_t begin, size_t offset) const {
    std::vector<const void*> sources;
    for (int rank = 0; rank < size_; ++rank) {
      sources.push_back(rank == channel.rank() ? data_ + (begin + offset) * element_
                                               : channel.slot(rank).data + offset * element_);
    }
    return sources;
  }

  // Of the piece of `count` elements that begins with element `begin`: reduces the part that belongs to this rank
  // (part_of()), and writes the result to this rank's tensor and to this rank's slot for the next round.
  void reduce_part(Channel& channel, size_t begin, size_t count) const {
    const ElementRange own = part_of(count, channel.rank());
    std::byte* const result = data_ + (begin + own.begin) * element_;
    reduce_into(result, contributions(channel, begin, own.begin), own.count);
    copy_bytes(channel.own_slot().data, result, own.count * element_);
  }
  void fetch_parts(Channel& channel, size_t begin, size_t count) const {
    for (int step = 1; step < size_; ++step) {
      const int rank = (channel.rank() + step) % size_;
      const ElementRange part = part_of(count, rank);
      if (part.count > 0) {
        copy_bytes(data_ + (begin + part.begin) * element_, channel.slot(rank).data, part.count * element_);
      }
    }
  }

  // Works block by block, so that the result of one rank is in a cache when the others read it. In each block:
  // 1. Rank r reads part r of all tensors and writes the result to part r of its own tensor. The other ranks read only
  //    other parts of that tensor meanwhile.
  // 2. After a round, rank r copies part d from the tensor of each rank d to its own. Part d of other tensors is not
  //    needed any more, since rank d has finished step 1, and no rank writes part d of rank d's tensor.
  StepCoroutine all_in_place(Channel& channel) {
    const auto tensors = shown_to(channel, data_);  // before the first meet(): later rounds overwrite the slots
    const size_t block = kPartInCache / element_ * size_;
    for (size_t begin = 0; begin < count_; begin += block) {
      const size_t count = std::min(block, count_ - begin);
      reduce_part_in_place(channel, tensors, begin, count);
      co_await meet(channel);
      fetch_parts_in_place(channel, tensors, begin, count);
    }
    co_await meet(channel, true);
  }
  void reduce_part_in_place(Channel& channel, const std::vector<const std::byte*>& tensors, size_t begin,
                            size_t count) const {
    const ElementRange own = part_of(count, channel.rank());
    std::vector<const void*> sources;
    for (const auto* tensor : tensors) sources.push_back(tensor + (begin + own.begin) * element_);
    InPlaceRead reading(channel);
    reduce_into(data_ + (begin + own.begin) * element_, sources, own.count);
    reading.end();
  }
  void fetch_parts_in_place(Channel& channel, const std::vector<const std::byte*>& tensors, size_t begin,
                            size_t count) const {
    InPlaceRead reading(channel);
    for (int step = 1; step < size_; ++step) {
      const int rank = (channel.rank() + step) % size_;
      const ElementRange part = part_of(count, rank);
      const size_t offset = (begin + part.begin) * element_;
      copy_bytes(data_ + offset, tensors[rank] + offset, part.count * element_);
    }
    reading.end();
  }

  // The steps of ranks other than the root: they only wait until the root has read their data.
  StepCoroutine only_meet(Channel& channel) { co_await meet(channel, true); }

  std::byte* data_;
  bool keeps_result_, to_root_;
};

// Reduce-scatter. Each rank's slot has one region for each other rank. A rank reduces the pieces that the other ranks
// wrote to their regions for it.
class ReduceScatter final : public Reduction {
 public:
  ReduceScatter(const CallDescriptor& call, void* output, std::vector<const void*> parts, size_t count)
      : Reduction(call, static_cast<int>(parts.size()), count), output_(static_cast<std::byte*>(output)) {
    for (const void* part : parts) parts_.push_back(static_cast<const std::byte*>(part));
  }

 private:
  bool ends_in_first_round(const Channel& channel) const override {
    return count_ <= region(channel) && bytes_ * size_ <= kLittleWorkBytes;
  }
  // Returns the number of elements that a slot's region for one rank can hold.
  size_t region(const Channel& channel) const {
    return channel.layout().slot_data() / std::max(1, size_ - 1) / 64 * 64 / element_;
  }
  // Index of the region for `to` in the slot of `from`.
  int place(int from, int to) const { return (to - from - 1 + size_) % size_; }

  bool show(const Channel& channel, const SlotView& slot) const override {
    for (int to = 0; to < size_; ++to) {
      const auto place = channel.show(parts_[to], bytes_);
      if (!place) return false;
      slot.table[to].place = *place;
    }
    return true;
  }

  void write_piece(const Channel& channel, const SlotView& slot, size_t begin) const override {
    const size_t elements = region(channel), count = std::min(elements, count_ - begin);
    for (int to = 0; to < size_; ++to) {
      if (to == channel.rank()) continue;
      copy_bytes(slot.data + place(channel.rank(), to) * elements * element_, parts_[to] + begin * element_,
                 count * element_);
    }
  }

  void write_first(Channel& channel, const SlotView& slot) override {
    start(channel, slot, region(channel) * element_);
  }

  StepCoroutine run(Channel& channel) override {
    const InPlaceMode way = in_place(channel, region(channel) * element_);
    return way == InPlaceMode::kAll ? reduce_in_place(channel, output_, parts_[channel.rank()])
                                    : by_pieces(channel, way == InPlaceMode::kSome);
  }

  StepCoroutine by_pieces(Channel& channel, bool write_first) {
    const size_t elements = region(channel);
    if (write_first) {
      write_piece(channel, channel.own_slot(), 0);
      co_await meet(channel, elements >= count_);
    }
    for (size_t begin = 0; begin < count_; begin += elements) {
      if (begin > 0) {
        write_piece(channel, channel.own_slot(), begin);
        co_await meet(channel, begin + elements >= count_);
      }
      reduce_piece(channel, begin);
    }
  }
  void reduce_piece(Channel& channel, size_t begin) const {
    const int own = channel.rank();
    const size_t elements = region(channel);
    std::vector<const void*> sources;
    for (int rank = 0; rank < size_; ++rank) {
      sources.push_back(rank == own ? parts_[own] + begin * element_
                                    : channel.slot(rank).data + place(rank, own) * elements * element_);
    }
    reduce_into(output_ + begin * element_, sources, std::min(elements, count_ - begin));
  }

  std::byte* output_;
  std::vector<const std::byte*> parts_;
};

}  // namespace

std::unique_ptr<Operation> make_all_reduce(const CallDescriptor& call, int size, void* data, size_t count) {
  return std::make_unique<AllReduce>(call, size, data, count, true, false);
}

std::unique_ptr<Operation> make_reduce(const CallDescriptor& call, int size, int rank, void* data, size_t count) {
  return std::make_unique<AllReduce>(call, size, data, count, rank == call.root, true);
}

std::unique_ptr<Operation> make_reduce_scatter(const CallDescriptor& call, void* output, std::vector<const void*> parts,
                                               size_t count) {
  return std::make_unique<ReduceScatter>(call, output, std::move(parts), count);
}

}  // namespace tessera::comm::shm
