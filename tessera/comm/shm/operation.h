// The collectives, each as a post() that never blocks and a finish() that waits, over a Channel.
//
//   auto operation = make_all_reduce(call, data, count);
//   operation->post(channel);                                   // the last operation of the group has ended
//   operation->finish(channel, Patience::kCaller, deadline);    // throws; then the group is broken
//
// Small messages take one round: all ranks write to their slots, meet, and read. Large ones go piece by piece through
// the two slots, which stay in the processors' caches. Where all ranks can read each other's memory in place they do:
// as threads of one process, or when it lies in shared buffers. Reductions add in rank order. Memory belongs to the operation until finish() returns.
// post() and finish() are COLLECTIVE over the ranks of the channel.
// Ranks that do not agree on the call find out in the first round, before anything is written to results.
#pragma once

#include <memory>
#include <vector>

#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/reduce.h"

namespace tessera::comm::shm {

class Operation {
 public:
  Operation(const Call& call, int size) : call_(call), size_(size) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void post(Channel& channel);
  void finish(Channel& channel, Patience patience, Clock::time_point deadline);
  // Ends after its first round and little copying: not worth another thread.
  virtual bool is_small(const Channel& channel) const = 0;
  void set_signature(const Signature& signature) { signature_ = signature; }

 protected:
  struct Waiting {
    Patience patience;
    Clock::time_point deadline;
  };
  // Fills the slot of the first round but for call and signature.
  virtual void write_first(Channel& channel, const Slot& slot) = 0;
  // The first round is complete and all ranks agree.
  virtual void run(Channel& channel, const Waiting& waiting) = 0;
  // Whether the messages of this call that take more than `fits` bytes are read where they are. To know after the
  // first round, the same on every rank. kSome: only some ranks' can, they have not written their first piece.
  enum class InPlace { kNone, kSome, kAll };
  InPlace in_place(Channel& channel, size_t fits) const;
  static void meet(Channel& channel, const Waiting& waiting) {
    channel.arrive();
    channel.wait(waiting.patience, waiting.deadline);
  }

  Call call_;
  int size_;

 private:
  void compare(Channel& channel) const;
  Signature signature_;
};

// Bytes that go to or come from one rank.
struct Outgoing {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};
struct Incoming {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Copies out[d] of each rank to in[own rank] of rank d; all-gather, broadcast, scatter, gather, all-to-all and barrier.
// A rank's message to itself is copied too unless it is in place. uniform: each rank sends the same to all.
std::unique_ptr<Operation> make_exchange(const Call& call, std::vector<Outgoing> out, std::vector<Incoming> in,
                                         bool uniform);
// In place, `count` elements.
std::unique_ptr<Operation> make_all_reduce(const Call& call, int size, void* data, size_t count);
// The result on the root alone; `data` of the others stays as it is.
std::unique_ptr<Operation> make_reduce(const Call& call, int size, int rank, void* data, size_t count);
// parts[r], of `count` elements each, is added up for rank r.
std::unique_ptr<Operation> make_reduce_scatter(const Call& call, void* output, std::vector<const void*> parts,
                                               size_t count);

}  // namespace tessera::comm::shm
