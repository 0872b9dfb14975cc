// One rank's end of a shared-memory group: its slots, the rounds, and what waiting means.
//
//   Slot slot = channel.own_slot();   // fill in
//   channel.arrive();
//   if (channel.ready()) ...          // all ranks have; throws when the group is broken off
//   channel.slot(2).data;             // what rank 2 wrote
//
// Never waits. Used by one thread at a time, but break_off(), is_broken() and the bells by any.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/errors/timed_out.h"
#include "tessera/comm/shm/layout.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

struct ChannelOptions {
  int rank = 0;
  int size = 1;
  std::vector<int> ranks;        // global, for messages; empty: those of the group
  std::vector<pid_t> processes;  // of each rank
  bool crowded = false;          // more ranks than cores on this host
  bool views = false;            // every rank may open what the others share
};

struct Slot {
  SlotHead* head;
  Message* table;
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
  bool crowded() const { return options_.crowded; }
  std::string name_of(int rank) const;  // "rank 3"

  // Where peers can read these bytes, while this rank keeps them as they are; nothing when they cannot.
  std::optional<Place> show(const void* data, size_t bytes) const;
  // What `rank` has shown, good for this call. Breaks the group off when it cannot be mapped.
  const std::byte* look(int rank, const Place& place, size_t bytes);

  // Between two calls: forgets mappings of buffers that their owners have freed. After the last call, or a failure:
  // all.
  void forget_freed();
  void forget_all() { views_.clear(); }
  // Whether what lies in shared buffers is read in place by other processes.
  bool shares_buffers() const { return options_.views && !same_process_; }

  Slot own_slot() { return slot_at(rank(), rounds_.next()); }
  Slot slot(int rank) { return slot_at(rank, rounds_.round()); }
  void arrive();
  // Whether all ranks have arrived in the round of this one. Throws when they never will.
  bool ready() const;

  RankWords& words(int rank) const { return *at<RankWords>(layout_.words(rank)); }
  Bells<Native>& bells(int rank) const { return words(rank).bells; }
  Bells<Native>& bells() const { return bells(rank()); }
  Ring<Native>& ring(int from, int to) const { return *at<Ring<Native>>(layout_.ring(from, to)); }
  std::byte* chunk(int from, int to, uint64_t number) { return memory_->data() + layout_.chunk(from, to, number); }

  // Tells the peers that this rank takes part no longer.
  void leave() noexcept;
  // Ends everybody's waits, with Disagreement or TimedOut when `error` is one, else PeerFailed. The first reason stays.
  void break_off(const std::string& reason, Broken kind = Broken::kPeerFailed) noexcept;
  void break_off(const std::exception& error) noexcept;
  // Breaks off and throws the first reason.
  [[noreturn]] void fail(const std::string& reason, Broken kind = Broken::kPeerFailed);
  bool is_broken() const { return head().rounds.broken.load() != 0; }
  [[noreturn]] void throw_broken() const;
  bool has_left(int rank) const { return words(rank).left.load() != 0; }
  // "rank 3 (process 4711) has ended": the process of a rank that has not left before; "" when there is none. What it
  // did before its end is to be looked at after this.
  std::string who_died() const;
  // After a failure: until no thread of this process reads this rank's memory in place any more. Other processes may:
  // they have mapped it themselves, and the end of their Reading tells them.
  void await_readers();
  // The ranks whose leaving makes the present round impossible; "" when there is none.
  std::string who_left() const;
  std::vector<bool> who_have_left() const;
  std::string who_is_missing() const;  // "rank 1, rank 2": not yet in the round

 private:
  friend class Reading;
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(memory_->data() + offset);
  }
  Head& head() const { return *at<Head>(0); }
  [[noreturn]] void fail_to_look(int rank, const Error& error);
  Slot slot_at(int rank, uint64_t round) const {
    std::byte* slot = memory_->data() + layout_.slot(rank, round);
    return {reinterpret_cast<SlotHead*>(slot), reinterpret_cast<Message*>(slot + layout_.table()),
            slot + layout_.slot_head()};
  }

  std::vector<Bells<Native>*> all_bells() const;

  std::shared_ptr<SharedMemory> memory_;
  ChannelOptions options_;
  Layout layout_;
  Rounds<Native> rounds_;
  bool same_process_;
  std::unordered_map<uint64_t, SharedView> views_;  // by SharedPlace::buffer
  bool mapped_ = false;                             // one of them, since forget_freed()
  std::vector<std::pair<int, UniqueFd>> watched_;   // rank and pidfd of each other process
};

// Held while other ranks' memory is read in place.
//
//   Reading reading(channel);     // throws when the group is broken off
//   ...                           // copy
//   reading.end();                // likewise: what was copied since may be rubbish
//
// A rank that fails frees its memory only after break_off(), and where threads of its process read it, only when they
// no longer do.
class Reading {
 public:
  explicit Reading(Channel& channel);
  ~Reading();
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  void end();

 private:
  Readers<Native>& readers() const;
  Channel& channel_;
  bool reads_ = true;
};

// Lays the words out in fresh memory.
void initialize(SharedMemory& memory, int size);

}  // namespace tessera::comm::shm
