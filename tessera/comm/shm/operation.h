// A collective over a Channel. post() starts it, and each step() advances it; neither blocks.
//
//   auto operation = make_all_reduce(call, size, data, count);
//   operation->post(channel);                                   // the previous operation of the group must have ended
//   while (operation->step(channel) != Operation::Progress::kDone) ...    // when it throws, the group must be aborted
//
// Small messages take one round: all ranks write to their slots, meet, and read the slots of the others. Large messages
// are sent piece by piece through the two slots of each rank, which stay in the processors' caches. Large messages are
// read in place, in the sender's memory, where all ranks can do so: as threads of one process, or from shared buffers.
// Reductions add in rank order. One step does about the work of one piece. The caller must keep the memory until the
// operation is done or destroyed.
// post() and step() are COLLECTIVE over the ranks of the channel; one thread at a time may call them. Ranks that made
// different calls throw Disagreement in the first round, before anything is written to results.
#pragma once

#include <memory>
#include <vector>

#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/reduce.h"
#include "tessera/comm/shm/step_coroutine.h"

namespace tessera::comm::shm {

class Operation {
 public:
  enum class Progress { kNone, kSome, kDone };

  Operation(const CallDescriptor& call, int size) : call_(call), size_(size) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void post(Channel& channel);
  // Makes a step if the present round is complete; otherwise returns kNone.
  Progress step(Channel& channel);
  // Whether a thread should advance this posted operation even while the caller computes, because peers may come to
  // wait for this rank or much data is left to copy. When false, the remaining steps can be left to the caller's
  // wait().
  bool may_delay_peers() const { return owes_; }
  void set_signature(const Signature& signature) { signature_ = signature; }

 protected:
  static constexpr size_t kLittleWorkBytes = 256 * 1024;  // bytes: less work than this is not worth another thread

  // Whether the operation has no second round, and at most kLittleWorkBytes bytes are left to copy after the first
  // round. Whether there is a second round depends only on values that are equal on all ranks.
  virtual bool ends_in_first_round(const Channel& channel) const = 0;
  // Fills the slot of the first round, except for SlotHead::call and signature, which post() fills.
  virtual void write_first(Channel& channel, const SlotView& slot) = 0;
  // Returns the coroutine of all steps after the first round. step() calls run() once, after the first round has shown
  // that all ranks have made the same call. The coroutine is suspended at meet() and pause().
  virtual StepCoroutine run(Channel& channel) = 0;
  // Returns whether messages of more than `fits` bytes are read in place (kAll) or in pieces (kNone, kSome). May be
  // called after the first round; the result is equal on every rank. kSome: some ranks have set SlotHead::direct and so
  // have not written their first piece to the slot, but another rank sends a message of more than `fits` bytes and has
  // not set SlotHead::direct.
  enum class InPlaceMode { kNone, kSome, kAll };
  InPlaceMode in_place(Channel& channel, size_t fits) const;

  // For `co_await meet(channel)`: this rank arrives in the next round, and the coroutine continues in a step() after
  // all ranks have arrived. `last`: after this round the peers need nothing more from this rank.
  std::suspend_always meet(Channel& channel, bool last = false) {
    owes_ = !last;
    channel.arrive();
    return {};
  }
  // To be awaited in run() between two blocks of data: ends the current step(), so that messages and deadlines are
  // handled before the next block.
  static std::suspend_always pause() { return {}; }

  CallDescriptor call_;
  int size_;

 private:
  void compare(Channel& channel) const;
  Signature signature_;
  bool owes_ = false;
  StepCoroutine steps_;
};

// SendBuffer: the message to one rank. ReceiveBuffer: the memory for the message from one rank.
struct SendBuffer {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};
struct ReceiveBuffer {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Copies out[d] of rank r to in[r] of rank d, for all pairs; used for all-gather, broadcast, scatter, gather,
// all-to-all and barrier. A rank's message to itself is copied too, unless source and target are the same memory.
// `uniform`: each rank sends one message to all.
std::unique_ptr<Operation> make_exchange(const CallDescriptor& call, std::vector<SendBuffer> out,
                                         std::vector<ReceiveBuffer> in, bool uniform);
// Reduces the `count` elements at `data` over all ranks. On every rank the result overwrites `data`.
std::unique_ptr<Operation> make_all_reduce(const CallDescriptor& call, int size, void* data, size_t count);
// Reduces to the root, in place; `data` of the other ranks is unchanged.
std::unique_ptr<Operation> make_reduce(const CallDescriptor& call, int size, int rank, void* data, size_t count);
// Reduces parts[r] of all ranks, `count` elements, to `output` of rank r.
std::unique_ptr<Operation> make_reduce_scatter(const CallDescriptor& call, void* output, std::vector<const void*> parts,
                                               size_t count);

}  // namespace tessera::comm::shm
