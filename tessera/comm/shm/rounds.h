// The protocols of a shared-memory group: ranks meet round by round and pass what each wrote in its slots, and pass
// messages through rings.
//
//   write(my_slot[rounds.next() % 2]);    // free: see below
//   rounds.arrive();                      // publishes it
//   bell.wait(waiter, [&] { return rounds.state() == RoundState::kComplete; });
//   read(their_slot[rounds.round() % 2]);
//
// A rank has two slots. The one written for round k + 2 was last read in round k; every rank that arrived in round
// k + 1 had ended its reading of round k, and who has seen round k + 1 complete has seen all of them arrive. So no
// second handshake is needed, and arrive() never blocks.
//
// The templates are for the model checker (tests/comm/shm_model_test.cc), which runs this code under every schedule:
// Platform::Word32 and Word64 have load(), store() and fetch_add(), all sequentially consistent, and
// Platform::wake_all(Word32&) ends the sleeps on a word. A Waiter has
//   bool spin()                          true while it is worth looking again
//   void sleep(Word32& word, uint32_t seen)  returns after a wake, at once when word != seen, or for no reason;
//                                        throws when there is no point in waiting any longer
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tessera::comm::shm {

// Waiting for a change of something else: whoever changes it calls ring() afterwards.
template <class Platform>
struct Bell {
  typename Platform::Word32 count{};
  typename Platform::Word32 sleepers{};

  // Cheap when nobody sleeps. A sleeper registers before it looks, so one of the two sees the other.
  void ring() {
    if (sleepers.load() != 0) ring_always();
  }
  void ring_always() {
    count.fetch_add(1);
    Platform::wake_all(count);
  }
  // Registers a sleeper, by itself or by another thread: it reads `count`, then looks, then sleeps while `count` stays.
  void enlist() { sleepers.fetch_add(1); }
  void dismiss() { sleepers.fetch_add(static_cast<uint32_t>(-1)); }

  // Returns when settled() is true. settled() may throw.
  template <class Waiter, class Settled>
  void wait(Waiter& waiter, const Settled& settled) {
    while (waiter.spin()) {
      if (settled()) return;
    }
    const Sleeper registered(*this);
    for (;;) {
      const uint32_t seen = count.load();
      if (settled()) return;
      waiter.sleep(count, seen);
    }
  }

 private:
  struct Sleeper {
    explicit Sleeper(Bell& bell) : bell_(bell) { bell_.enlist(); }
    ~Sleeper() { bell_.dismiss(); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    Bell& bell_;
  };
};

// The bells of one rank: a thread of it that drives its calls sleeps at `driver`; while none does, its worker thread
// may be enlisted at `worker`.
template <class Platform>
struct Bells {
  alignas(64) Bell<Platform> driver;
  Bell<Platform> worker;
  void ring() {
    driver.ring();
    worker.ring();
  }
  void ring_always() {
    driver.ring_always();
    worker.ring_always();
  }
};

// What the ranks share. All zero at the start, but `done` holds the number of rounds taken as done before.
template <class Platform>
struct RoundWords {
  alignas(64) typename Platform::Word64 arrivals{};  // over all rounds
  alignas(64) typename Platform::Word32 done{};      // the last complete round, modulo 2^32
  typename Platform::Word32 broken{};                // not zero: no round is completed any more
};

enum class RoundState { kOpen, kComplete, kBroken };

// One object a rank; its calls come from one thread at a time, break_off() from any thread.
template <class Platform, class RankBells = Bells<Platform>>
class Rounds {
 public:
  // bells: of each rank. first: the number of rounds taken as done before.
  Rounds(RoundWords<Platform>& words, std::vector<RankBells*> bells, int rank, uint64_t first = 0)
      : words_(words), bells_(std::move(bells)), rank_(static_cast<size_t>(rank)), first_(first), round_(first) {}

  uint64_t round() const { return round_; }  // the one that this rank arrived in last
  uint64_t next() const { return round_ + 1; }

  void arrive() {
    ++round_;
    if (words_.arrivals.fetch_add(1) + 1 != (round_ - first_) * bells_.size()) return;
    words_.done.store(static_cast<uint32_t>(round_));
    for (size_t peer = 0; peer < bells_.size(); ++peer) {
      if (peer != rank_) bells_[peer]->ring();
    }
  }

  // Whether all ranks have arrived in round(). Never blocks.
  bool complete() const { return static_cast<int32_t>(words_.done.load() - static_cast<uint32_t>(round_)) >= 0; }

  // Of round(). A round that was complete before the group broke off still counts.
  RoundState state() const {
    if (complete()) return RoundState::kComplete;
    if (words_.broken.load() == 0) return RoundState::kOpen;
    return complete() ? RoundState::kComplete : RoundState::kBroken;
  }

  // Ends all waits, and all later ones for rounds that are not complete.
  void break_off() {
    words_.broken.store(1);
    for (RankBells* bells : bells_) bells->ring_always();
  }

 private:
  RoundWords<Platform>& words_;
  std::vector<RankBells*> bells_;
  size_t rank_;
  uint64_t first_;
  uint64_t round_;
};

// Reads of other ranks' memory in place that are under way in one rank. Who breaks the group off frees its memory when
// nobody reads any more: a reader that saw no break when it had entered keeps the memory alive until it has left.
template <class Platform>
struct Readers {
  typename Platform::Word32 count{};

  // False: the group is broken off, and there is nothing to read.
  bool enter(const typename Platform::Word32& broken) {
    count.fetch_add(1);
    if (broken.load() == 0) return true;
    count.fetch_add(static_cast<uint32_t>(-1));
    return false;
  }
  // False: the group was broken off meanwhile; what was read may be rubbish.
  bool leave(const typename Platform::Word32& broken) {
    count.fetch_add(static_cast<uint32_t>(-1));
    return broken.load() == 0;
  }
  bool are_there() const { return count.load() != 0; }
};

// The ring of chunks from one rank to another: the sender writes chunk `filled` and then counts it, the receiver reads
// chunk `emptied` and then counts it. Chunk n lies where chunk n - kChunks lay.
template <class Platform, class RankBells = Bells<Platform>>
struct Ring {
  static constexpr uint64_t kChunks = 2;
  alignas(64) typename Platform::Word64 filled{};
  alignas(64) typename Platform::Word64 emptied{};

  bool has_room() const { return filled.load() - emptied.load() < kChunks; }
  bool has_chunk() const { return emptied.load() != filled.load(); }
  void put(RankBells& of_receiver) {
    filled.fetch_add(1);
    of_receiver.ring();
  }
  void take(RankBells& of_sender) {
    emptied.fetch_add(1);
    of_sender.ring();
  }
};

}  // namespace tessera::comm::shm
