#include "tessera/comm/shm/operation.h"

#include "tessera/base/error.h"

namespace tessera::comm::shm {
namespace {

std::string describe(const CallDescriptor& call) {
  std::string text = comm::to_string(call.kind);
  if (is_reduction(call.kind)) text += fmt::format("({})", name_of(static_cast<RedOp>(call.reduce)));
  if (call.root >= 0) text += fmt::format("(root {})", call.root);
  if (call.elements > 0) {
    text += call.dtype >= 0
                ? fmt::format(" of {} {}", call.elements, c10::toString(static_cast<c10::ScalarType>(call.dtype)))
                : fmt::format(" of {} bytes", call.elements);
  }
  return text;
}

// Throws Disagreement if calls differ. The message names rank 0 and the first rank whose call differs from rank 0's, so
// it is the same on every rank.
void compare_calls(Channel& channel, int size) {
  const SlotView first = channel.slot(0);
  for (int rank = 1; rank < size; ++rank) {
    const SlotView other = channel.slot(rank);
    if (other.head->call == first.head->call) continue;
    throw Disagreement(
        fmt::format("{} calls {}, {} calls {}. All ranks of a group must make the same calls in the same order",
                    channel.name_of(0), describe(first.head->call), channel.name_of(rank), describe(other.head->call)));
  }
}

}  // namespace

void Operation::post(Channel& channel) {
  channel.unmap_freed_buffers();
  const SlotView slot = channel.own_slot();
  *slot.head = {.call = call_, .signature = signature_, .longest = 0, .outgoing = 0, .direct = 0};
  write_first(channel, slot);
  owes_ = !ends_in_first_round(channel);
  channel.arrive();
}

// Computes the InPlaceMode from the SlotHead that each rank has written to its slot for this round. All ranks read the
// same SlotHeads, so the mode is the same on all ranks.
Operation::InPlaceMode Operation::in_place(Channel& channel, size_t fits) const {
  bool some = false, all = true;
  for (int rank = 0; rank < size_; ++rank) {
    const SlotHead& head = *channel.slot(rank).head;
    some = some || head.direct;
    all = all && (head.direct || head.outgoing <= fits);
  }
  return !some ? InPlaceMode::kNone : all ? InPlaceMode::kAll : InPlaceMode::kSome;
}

// Compares the announced signatures when every rank has one, and the CallDescriptor in any case. Every rank compares
// the slots of all ranks, so all of them throw or none does.
void Operation::compare(Channel& channel) const {
  bool announced = true, differ = false;
  for (int rank = 0; rank < size_; ++rank) {
    const SlotHead& head = *channel.slot(rank).head;
    announced = announced && head.signature.hash != 0;
    differ = differ || head.signature.hash != signature_.hash;
  }
  if (announced && differ) {
    std::vector<RankSignature> calls;
    for (int rank = 0; rank < size_; ++rank) calls.emplace_back(rank, channel.slot(rank).head->signature);
    raise_disagreement(signature_.group, calls);
  }
  compare_calls(channel, size_);
}

Operation::Progress Operation::step(Channel& channel) {
  if (!channel.ready()) return Progress::kNone;
  if (!steps_) {
    compare(channel);
    steps_ = run(channel);
  }
  return steps_.resume_once() ? Progress::kDone : Progress::kSome;
}

}  // namespace tessera::comm::shm
