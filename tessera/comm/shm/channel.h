// One rank's access to a shared-memory group: its slots, the rounds, and the failure of the group.
//
//   SlotView slot = channel.own_slot();   // to be filled
//   channel.arrive();
//   if (channel.ready()) ...              // all ranks have arrived; throws when the group was aborted
//   channel.slot(2).data;                 // the data that rank 2 wrote
//
// Only these functions wait: await_readers(), look() after an error (up to 2 s), and abort_group() while another rank
// writes its reason (up to 100 ms). One thread at a time may use a Channel; abort_group(), is_aborted() and the bells
// may be used by any thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/errors/timed_out.h"
#include "tessera/comm/shm/layout.h"
#include "tessera/comm/shm/shared_memory.h"

namespace tessera::comm::shm {

struct ChannelOptions {
  int rank = 0;
  int size = 1;
  std::vector<int> ranks;        // global ranks, for messages; empty: positions in the group are shown
  std::vector<pid_t> processes;  // process of each rank
  bool oversubscribed = false;   // more ranks than cores on this host
  bool views = false;            // every rank may open the shared buffers of the others
};

struct SlotView {
  SlotHead* head;
  MessageEntry* table;
  std::byte* data;
};

class Channel {
 public:
  Channel(std::shared_ptr<SharedMemory> memory, ChannelOptions options);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const Layout& layout() const { return layout_; }
  bool same_process() const { return same_process_; }  // all ranks are threads of this process
  bool same_process(int rank) const { return options_.processes[rank] == options_.processes[options_.rank]; }
  bool oversubscribed() const { return options_.oversubscribed; }
  std::string name_of(int rank) const;  // "rank 3"

  // Returns the place at which peers can read these bytes in this rank's memory; nullopt when peers cannot read them
  // there. This rank must not change the bytes until all peers have read them.
  std::optional<MessagePlace> show(const void* data, size_t bytes) const;
  // Returns the bytes for which show() on `rank` has returned `place`, mapped into this process. The pointer is valid
  // during the present collective. Aborts the group when the bytes cannot be mapped.
  const std::byte* look(int rank, const MessagePlace& place, size_t bytes);

  // unmap_freed_buffers() unmaps buffers that their owners have freed; it is called between two collectives.
  // unmap_all_buffers() unmaps all buffers; it is called after the last collective or a failure.
  void unmap_freed_buffers();
  void unmap_all_buffers() { views_.clear(); }
  // Whether other processes can read this rank's shared buffers in place: every rank may open the shared buffers of all
  // others (ChannelOptions::views), and not all ranks are in this process.
  bool shares_buffers() const { return options_.views && !same_process_; }

  SlotView own_slot() { return slot_at(rank(), rounds_.next()); }
  SlotView slot(int rank) { return slot_at(rank, rounds_.round()); }
  void arrive();
  // Returns whether all ranks have arrived in this rank's present round. Throws when the group was aborted before all
  // ranks arrived.
  bool ready() const;

  RankWords& words(int rank) const { return *at<RankWords>(layout_.words(rank)); }
  RankEventCounts<Native>& bells(int rank) const { return words(rank).bells; }
  RankEventCounts<Native>& bells() const { return bells(rank()); }
  Ring<Native>& ring(int from, int to) const { return *at<Ring<Native>>(layout_.ring(from, to)); }
  std::byte* chunk(int from, int to, uint64_t number) { return memory_->data() + layout_.chunk(from, to, number); }

  // Marks this rank as having left the group, and wakes the peers.
  void leave() noexcept;
  // Aborts the group: ends the waits of all ranks with Disagreement or TimedOut when `error` is one of them, otherwise
  // with PeerFailed. The first reason is kept.
  void abort_group(const std::string& reason, AbortReason kind = AbortReason::kPeerFailed) noexcept;
  void abort_group(const std::exception& error) noexcept;
  // Aborts the group and throws an exception with the first reason, which may be another rank's.
  [[noreturn]] void fail(const std::string& reason, AbortReason kind = AbortReason::kPeerFailed);
  bool is_aborted() const { return head().rounds.broken.load() != 0; }
  [[noreturn]] void throw_abort_reason() const;
  bool has_left(int rank) const { return words(rank).left.load() != 0; }
  // Text such as "rank 3 (process 4711) has ended", for a rank whose process has ended without leave(); "" when there
  // is none. The rank may have completed its side of a collective before it ended, so the caller must try one more
  // Operation::step() before it fails the collective.
  std::string dead_rank_text() const;
  // After an abort: waits until no thread of this process reads this rank's memory in place any more. Other processes
  // are not waited for: they have mappings of their own, and InPlaceRead::end() throws there.
  void await_readers();
  // Name of a rank that has left without arriving in the present round, which can then never complete; "" when none.
  std::string left_rank_name() const;
  std::vector<bool> left_by_rank() const;  // by rank
  std::string missing_rank_names() const;  // ranks that have not arrived in the present round: "rank 1, rank 2"

 private:
  friend class InPlaceRead;
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(memory_->data() + offset);
  }
  Head& head() const { return *at<Head>(0); }
  [[noreturn]] void fail_to_look(int rank, const Error& error);
  SlotView slot_at(int rank, uint64_t round) const {
    std::byte* slot = memory_->data() + layout_.slot(rank, round);
    return {reinterpret_cast<SlotHead*>(slot), reinterpret_cast<MessageEntry*>(slot + layout_.table()),
            slot + layout_.slot_head()};
  }

  std::vector<RankEventCounts<Native>*> all_bells() const;

  std::shared_ptr<SharedMemory> memory_;
  ChannelOptions options_;
  Layout layout_;
  Rounds<Native> rounds_;
  bool same_process_;
  std::unordered_map<uint64_t, SharedView> views_;  // mapped buffers of other ranks, by SharedBufferPlace::buffer
  bool mapped_ = false;                             // a buffer was mapped since unmap_freed_buffers()
  std::vector<std::pair<int, UniqueFd>> watched_;   // rank and pidfd of each other process
};

// Scope in which other ranks' memory is read in place.
//
//   InPlaceRead reading(channel); // throws when the group was aborted
//   ...                           // copy
//   reading.end();                // throws when the group was aborted meanwhile: the copied data may be invalid
//
// A rank that fails frees its memory only after abort_group(), and only after all InPlaceReads of threads of its
// process have ended (await_readers).
class InPlaceRead {
 public:
  explicit InPlaceRead(Channel& channel);
  ~InPlaceRead();
  InPlaceRead(const InPlaceRead&) = delete;
  InPlaceRead& operator=(const InPlaceRead&) = delete;
  void end();

 private:
  InPlaceReaderCount<Native>& readers() const;
  Channel& channel_;
  bool reads_ = true;
};

// Constructs the Head, RankWords and Rings (layout.h) in new shared memory.
void initialize(SharedMemory& memory, int size);

}  // namespace tessera::comm::shm
