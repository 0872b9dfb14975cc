// The slot protocol of a shared-memory group: ranks meet round by round and pass what each wrote in its slots.
//
//   write(my_slot[rounds.next() % 2]);    // free: see below
//   rounds.arrive();                      // publishes it
//   rounds.wait(waiter);                  // all ranks have arrived
//   read(their_slot[rounds.round() % 2]);
//
// A rank has two slots. The one written for round k + 2 was last read in round k; every rank that arrived in round
// k + 1 had ended its reading of round k, and wait() of round k + 1 has seen all of them arrive. So no second
// handshake is needed, and arrive() never blocks.
//
// The template is for the model checker (tests/comm/shm_model_test.cc), which runs this code under every schedule:
// Platform::Word32 and Word64 have load(), store() and fetch_add(), all sequentially consistent, and
// Platform::wake_all(Word32&) ends the sleeps on a word. A Waiter has
//   bool spin()                          true while it is worth looking again
//   void sleep(Word32& word, uint32_t seen)  returns after a wake, at once when word != seen, or for no reason;
//                                        throws when there is no point in waiting any longer
//   [[noreturn]] void broken()           throws: the group was broken off
// One object a rank; its calls come from one thread at a time, break_off() from any thread.
#pragma once

#include <cstdint>

namespace tessera::comm::shm {

// Waiting for a change of something else: whoever changes it calls ring() afterwards.
template <class Platform>
struct Bell {
  alignas(64) typename Platform::Word32 count{};
  typename Platform::Word32 sleepers{};

  // Cheap when nobody sleeps. A sleeper registers before it looks, so one of the two sees the other.
  void ring() {
    if (sleepers.load() != 0) ring_always();
  }
  void ring_always() {
    count.fetch_add(1);
    Platform::wake_all(count);
  }
  // Returns when settled() is true. settled() may throw.
  template <class Waiter, class Settled>
  void wait(Waiter& waiter, const Settled& settled) {
    while (waiter.spin()) {
      if (settled()) return;
    }
    const Sleeper registered(sleepers);
    for (;;) {
      const uint32_t seen = count.load();
      if (settled()) return;
      waiter.sleep(count, seen);
    }
  }

 private:
  struct Sleeper {
    explicit Sleeper(typename Platform::Word32& word) : word_(word) { word_.fetch_add(1); }
    ~Sleeper() { word_.fetch_add(static_cast<uint32_t>(-1)); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    typename Platform::Word32& word_;
  };
};

// What the ranks share. All zero at the start, but `done` holds the number of rounds taken as done before.
template <class Platform>
struct RoundWords {
  alignas(64) typename Platform::Word64 arrivals{};  // over all rounds
  alignas(64) typename Platform::Word32 done{};      // the last complete round, modulo 2^32
  typename Platform::Word32 broken{};                // not zero: no round is completed any more
  Bell<Platform> bell;
};

template <class Platform>
class Rounds {
 public:
  // first: the number of rounds taken as done before.
  Rounds(RoundWords<Platform>& words, int size, uint64_t first = 0)
      : words_(words), size_(size), first_(first), round_(first) {}

  uint64_t round() const { return round_; }  // the one that this rank arrived in last
  uint64_t next() const { return round_ + 1; }

  void arrive() {
    ++round_;
    if (words_.arrivals.fetch_add(1) + 1 == (round_ - first_) * static_cast<uint64_t>(size_)) {
      words_.done.store(static_cast<uint32_t>(round_));
      words_.bell.ring();
    }
  }

  // Whether all ranks have arrived in round(). Never blocks.
  bool complete() const { return static_cast<int32_t>(words_.done.load() - static_cast<uint32_t>(round_)) >= 0; }

  // Until complete(). A round that was complete before the group broke off still counts.
  template <class Waiter>
  void wait(Waiter& waiter) {
    words_.bell.wait(waiter, [&] {
      if (complete()) return true;
      if (words_.broken.load() == 0) return false;
      if (complete()) return true;
      waiter.broken();
    });
  }

  // Ends all waits, and all later ones for rounds that are not complete.
  void break_off() {
    words_.broken.store(1);
    words_.bell.ring_always();
  }

 private:
  RoundWords<Platform>& words_;
  int size_;
  uint64_t first_;
  uint64_t round_;
};

}  // namespace tessera::comm::shm
