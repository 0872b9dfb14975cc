// The collectives, each as a post() and steps that never block, over a Channel.
//
//   auto operation = make_all_reduce(call, size, data, count);
//   operation->post(channel);                                   // the last operation of the group has ended
//   while (operation->step(channel) != Operation::Progress::kDone) ...    // throws; then the group is to be broken off
//
// Small messages take one round: all ranks write to their slots, meet, and read. Large ones go piece by piece through
// the two slots, which stay in the processors' caches. Where all ranks can read each other's memory in place they do:
// as threads of one process, or when it lies in shared buffers. Reductions add in rank order. A step does about as much
// as one piece. Memory belongs to the operation until it is done or destroyed.
// post() and step() are COLLECTIVE over the ranks of the channel, and come from one thread at a time.
// Ranks that do not agree on the call find out in the first round, before anything is written to results.
#pragma once

#include <memory>
#include <vector>

#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/reduce.h"
#include "tessera/comm/shm/steps.h"

namespace tessera::comm::shm {

class Operation {
 public:
  enum class Progress { kNone, kSome, kDone };

  Operation(const Call& call, int size) : call_(call), size_(size) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void post(Channel& channel);
  // kNone: the present round is not complete.
  Progress step(Channel& channel);
  // Posted, and peers may come to wait for something that this rank has not done yet, or enough is left to do that it
  // is worth another thread. When not, only the caller needs the rest, and can do it when it waits.
  bool owes() const { return owes_; }
  void set_signature(const Signature& signature) { signature_ = signature; }

 protected:
  static constexpr size_t kLittle = 256 * 1024;  // bytes to copy or add up that are not worth another thread

  // Whether no rank has a part in a second round, by what ranks agree on, so that it is the same on all of them; and
  // little is left to do after the first one.
  virtual bool ends_in_first_round(const Channel& channel) const = 0;
  // Fills the slot of the first round but for call and signature.
  virtual void write_first(Channel& channel, const Slot& slot) = 0;
  // What comes when the first round is complete and all ranks agree. Left at meet() and pause().
  virtual Steps run(Channel& channel) = 0;
  // Whether the messages of this call that take more than `fits` bytes are read where they are. To know after the
  // first round, the same on every rank. kSome: only some ranks' can, they have not written their first piece.
  enum class InPlace { kNone, kSome, kAll };
  InPlace in_place(Channel& channel, size_t fits) const;

  // co_await these. The next step comes when all ranks have met. last: the peers need nothing more of this rank.
  std::suspend_always meet(Channel& channel, bool last = false) {
    owes_ = !last;
    channel.arrive();
    return {};
  }
  // So that messages and deadlines get their turn.
  static std::suspend_always pause() { return {}; }

  Call call_;
  int size_;

 private:
  void compare(Channel& channel) const;
  Signature signature_;
  bool owes_ = false;
  Steps steps_;
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
