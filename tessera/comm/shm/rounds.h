// The protocols of a shared-memory group: ranks meet in rounds, in which they exchange the data of their slots, and
// send messages through rings.
//
//   write(my_slot[rounds.next() % 2]);    // no rank reads this slot any more, as shown below
//   rounds.arrive();                      // publishes the slot
//   bell.wait(waiter, [&] { return rounds.state() == RoundState::kComplete; });
//   read(their_slot[rounds.round() % 2]);
//
// A rank has two slots. The slot that is written for round k + 2 was last read in round k. Every rank finishes reading
// round k before it arrives in round k + 1, and a rank writes for round k + 2 only after it has seen round k + 1
// complete, which means that all ranks have arrived in it. So no second handshake is needed, and arrive() never blocks.
//
// The code is templates so that the model checker (tests/comm/shm_model_test.cc) can run it under every schedule.
// Platform::Word32 and Word64 have load(), store() and fetch_add(), all sequentially consistent, and
// Platform::wake_all(Word32&) ends the sleeps on a word. A Waiter has
//   bool spin()                              returns true while the caller should look again without sleeping
//   void sleep(Word32& word, uint32_t seen)  returns after a wake, at once when word != seen, or spuriously; may throw
//                                            to end the wait
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tessera::comm::shm {

// A wake-up for changes of other shared state: a thread that changes the state calls ring() afterwards (an event
// count).
template <class Platform>
struct EventCount {
  typename Platform::Word32 count{};
  typename Platform::Word32 sleepers{};

  // Wakes the sleepers. If there is no sleeper, the call costs one load. A sleeper calls register_sleeper() before it
  // reads the shared state that it waits for. The thread that calls ring() changes this state before ring() reads
  // `sleepers`. So either the sleeper sees the change, or ring() sees the sleeper.
  void ring() {
    if (sleepers.load() != 0) ring_unconditionally();
  }
  void ring_unconditionally() {
    count.fetch_add(1);
    Platform::wake_all(count);
  }
  // Registers a sleeper; another thread may make this call for the sleeper. After that the sleeper reads `count`, then
  // looks at the shared state that it waits for, then sleeps while `count` still has the value that it has read.
  void register_sleeper() { sleepers.fetch_add(1); }
  void unregister_sleeper() { sleepers.fetch_add(static_cast<uint32_t>(-1)); }

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
    explicit Sleeper(EventCount& bell) : bell_(bell) { bell_.register_sleeper(); }
    ~Sleeper() { bell_.unregister_sleeper(); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    EventCount& bell_;
  };
};

// The bells of one rank. The thread that drives the rank's engine sleeps at `driver`. While no thread drives, the
// worker thread may be registered at `worker`.
template <class Platform>
struct RankEventCounts {
  alignas(64) EventCount<Platform> driver;
  EventCount<Platform> worker;
  void ring() {
    driver.ring();
    worker.ring();
  }
  void ring_unconditionally() {
    driver.ring_unconditionally();
    worker.ring_unconditionally();
  }
};

// The words of the round protocol that all ranks share. At the start all are zero; when the first rounds are skipped
// (`first` of Rounds), `done` holds their number.
template <class Platform>
struct RoundWords {
  alignas(64) typename Platform::Word64 arrivals{};  // number of arrivals in all rounds
  alignas(64) typename Platform::Word32 done{};      // the last complete round, modulo 2^32
  typename Platform::Word32 broken{};                // not zero: no round is completed any more
};

enum class RoundState { kOpen, kComplete, kBroken };

// Runs the round protocol for one rank. One thread at a time may use it; abort_group() may be called from any thread.
template <class Platform, class RankBells = RankEventCounts<Platform>>
class Rounds {
 public:
  // bells: one per rank. first: the number of rounds that are skipped, so that the first round of this object has the
  // number first + 1. Tests use `first` to begin with large round numbers.
  Rounds(RoundWords<Platform>& words, std::vector<RankBells*> bells, int rank, uint64_t first = 0)
      : words_(words), bells_(std::move(bells)), rank_(static_cast<size_t>(rank)), first_(first), round_(first) {}

  uint64_t round() const { return round_; }  // the round in which this rank has arrived last
  uint64_t next() const { return round_ + 1; }

  // The last rank to arrive marks the round as done and rings the bells of the others.
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

  // Returns the state of the round in which this rank arrived last, round(). words_.done is read again after
  // words_.broken, so that a round that was complete before the abort still counts as complete.
  RoundState state() const {
    if (complete()) return RoundState::kComplete;
    if (words_.broken.load() == 0) return RoundState::kOpen;
    return complete() ? RoundState::kComplete : RoundState::kBroken;
  }

  // Aborts: ends all present and later waits for rounds that are not complete.
  void abort_group() {
    words_.broken.store(1);
    for (RankBells* bells : bells_) bells->ring_unconditionally();
  }

 private:
  RoundWords<Platform>& words_;
  std::vector<RankBells*> bells_;
  size_t rank_;
  uint64_t first_;
  uint64_t round_;
};

// The number of reads of other ranks' memory that are under way in one rank. A rank that aborts the group sets
// `broken`. Before it frees its memory it waits until the counts of all ranks of its process are 0
// (Channel::await_readers). A reader increments its count before it reads `broken`: so either the reader sees the abort
// and does not read the memory, or the aborting rank sees the count and waits.
template <class Platform>
struct InPlaceReaderCount {
  typename Platform::Word32 count{};

  // Must be called before this rank reads another rank's memory. Returns false when the group was aborted; then that
  // memory must not be read.
  bool enter(const typename Platform::Word32& broken) {
    count.fetch_add(1);
    if (broken.load() == 0) return true;
    count.fetch_add(static_cast<uint32_t>(-1));
    return false;
  }
  // Must be called after the read that enter() has announced. Returns false when the group has been aborted; then the
  // data that were read since enter() may be invalid.
  bool leave(const typename Platform::Word32& broken) {
    count.fetch_add(static_cast<uint32_t>(-1));
    return broken.load() == 0;
  }
  bool are_there() const { return count.load() != 0; }
};

// The ring of chunks from one rank to another. The sender writes chunk `filled` and then increments `filled`; the
// receiver reads chunk `emptied` and then increments `emptied`. Chunk n uses the memory of chunk n - kChunks.
template <class Platform, class RankBells = RankEventCounts<Platform>>
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
