// The protocols of shared-memory groups under every schedule. The code of rounds.h runs on fibers, each access to a
// shared word is a step, and a search visits every order of the ranks' steps. The search reports three kinds of errors:
// - ranks that sleep forever;
// - memory that is read too early or overwritten too late, by vector clocks: an order that the atomics do not enforce
//   is an error even if the values are right;
// - wrong values.
// States that were visited are not visited again. If there are too many schedules, only schedules with few preemptions
// are visited; a preemption is a switch away from a rank that can continue. Each protocol also runs in broken variants,
// in which the search must find an error.
#include <gtest/gtest.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/comm/shm/rounds.h"

namespace tessera::comm::shm {
namespace {

constexpr int kMaxFibers = 3;
using Clock = std::array<uint32_t, kMaxFibers>;

void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < kMaxFibers; ++i) clock[i] = std::max(clock[i], other[i]);
}
bool before(const Clock& a, const Clock& b) {
  for (int i = 0; i < kMaxFibers; ++i) {
    if (a[i] > b[i]) return false;
  }
  return true;
}

class Hash {
 public:
  void add(uint64_t value) { state_ = (state_ ^ value) * 0x9E3779B97F4A7C15ULL + (state_ >> 29); }
  void add(const Clock& clock) {
    for (const uint32_t time : clock) add(time);
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x243F6A8885A308D3ULL;
};

// One run of all ranks under one schedule.
class Machine {
 public:
  struct Word {
    uint64_t value = 0;
    Clock clock{};
  };
  struct SlotView {
    uint64_t value = 0;
    Clock written{};                       // time of the last write
    std::array<Clock, kMaxFibers> read{};  // times of each fiber's last read
  };

  static inline Machine* current = nullptr;
  std::vector<Word*> words;
  std::vector<SlotView> slots;
  std::string failure;
  bool lose_wakes = false;

  void add(std::function<void()> body) {
    auto fiber = std::make_unique<Fiber>();
    fiber->body = std::move(body);
    ::getcontext(&fiber->context);
    fiber->context.uc_stack = {.ss_sp = fiber->stack.get(), .ss_flags = 0, .ss_size = kStack};
    fiber->context.uc_link = nullptr;
    ::makecontext(&fiber->context, &Machine::enter, 0);
    fibers_.push_back(std::move(fiber));
  }
  std::vector<int> enabled() const {
    std::vector<int> result;
    for (size_t i = 0; i < fibers_.size(); ++i) {
      if (!fibers_[i]->done && !fibers_[i]->asleep_on) result.push_back(static_cast<int>(i));
    }
    return result;
  }
  bool all_done() const {
    return std::ranges::all_of(fibers_, [](const auto& fiber) { return fiber->done; });
  }
  // Runs fiber `index` until its next step.
  void run(int index) {
    running_ = index;
    current = this;
    Fiber& fiber = *fibers_[index];
    if (_setjmp(scheduler_resume_) != 0) return;
    if (fiber.started) _longjmp(fiber.resume, 1);  // swapcontext(3) needs two system calls a step
    fiber.started = true;
    ::setcontext(&fiber.context);
  }
  uint64_t hash() const {
    Hash hash;
    for (const Word* word : words) {
      hash.add(word->value);
      hash.add(word->clock);
    }
    for (const SlotView& slot : slots) {
      hash.add(slot.value);
      hash.add(slot.written);
      for (const Clock& clock : slot.read) hash.add(clock);
    }
    for (const auto& fiber : fibers_) {
      hash.add(fiber->history.value());
      hash.add(fiber->clock);
      hash.add((fiber->done ? 1 : 0) + (fiber->asleep_on ? 2 : 0));
    }
    return hash.value();
  }

  // The following functions are called by the fibers.
  void step() {
    Fiber& fiber = self();
    fiber.history.add(3);
    if (_setjmp(fiber.resume) == 0) _longjmp(scheduler_resume_, 1);
  }
  void observe(uint64_t value) { self().history.add(value); }
  Clock& clock() { return self().clock; }
  void tick() { ++self().clock[running_]; }  // called at each access to a slot
  // From now on the state of the running fiber depends only on `what`. The values that the fiber has read before no
  // longer count.
  void forget_all_but(uint64_t what) {
    self().history = Hash();
    self().history.add(what);
  }
  void sleep_on(Word* word) {
    self().asleep_on = word;
    step();
  }
  void wake(Word* word) {
    for (const auto& fiber : fibers_) {
      if (fiber->asleep_on == word && !lose_wakes) fiber->asleep_on = nullptr;
    }
  }
  void fail(const std::string& what) {
    if (failure.empty()) failure = what;
  }
  // Accesses to slots are no steps. Accesses that the words do not order are found by their vector clocks under any
  // schedule.
  void write_slot(int index, uint64_t value) {
    tick();
    SlotView& slot = slots[index];
    bool ordered = before(slot.written, clock());
    for (const Clock& read : slot.read) ordered = ordered && before(read, clock());
    if (!ordered) fail("a slot is overwritten while others may read it");
    slot.value = value;
    slot.written = clock();
    observe(1);
  }
  uint64_t read_slot(int index) {
    tick();
    SlotView& slot = slots[index];
    if (!before(slot.written, clock())) fail("a slot is read while it may be written");
    slot.read[running_] = clock();
    observe(slot.value);
    return slot.value;
  }

 private:
  static constexpr size_t kStack = 64 * 1024;
  struct Fiber {
    std::function<void()> body;
    ucontext_t context{};
    std::unique_ptr<char[]> stack{new char[kStack]};
    std::jmp_buf resume;
    bool started = false;
    Word* asleep_on = nullptr;
    bool done = false;
    Hash history;
    Clock clock{};
  };
  static void enter() {
    Fiber& fiber = current->self();
    fiber.body();
    fiber.done = true;
    _longjmp(current->scheduler_resume_, 1);
  }
  Fiber& self() { return *fibers_[running_]; }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::jmp_buf scheduler_resume_;
  int running_ = 0;
};

// The platform on which rounds.h runs here.
struct Model {
  template <class Value>
  struct Atomic : Machine::Word {
    Atomic() {
      if (Machine::current) Machine::current->words.push_back(this);
    }
    Value load() const {
      Machine& machine = *Machine::current;
      machine.step();
      join(machine.clock(), clock);
      machine.observe(value);
      return static_cast<Value>(value);
    }
    void store(Value desired) {
      Machine& machine = *Machine::current;
      machine.step();
      value = desired;
      clock = machine.clock();
      machine.observe(2);
    }
    Value fetch_add(Value amount) {
      Machine& machine = *Machine::current;
      machine.step();
      join(machine.clock(), clock);
      clock = machine.clock();
      const auto old = static_cast<Value>(value);
      value = static_cast<Value>(old + amount);
      machine.observe(old);
      return old;
    }
  };
  using Word32 = Atomic<uint32_t>;
  using Word64 = Atomic<uint64_t>;
  static void wake_all(Word32& word) {
    Machine::current->step();
    Machine::current->wake(&word);
  }
};

struct Broken {};

struct ModelWaiter {
  int looks = 0;  // polls before the sleep
  bool spin() { return looks-- > 0; }
  void sleep(Model::Word32& word, uint32_t seen) {
    Machine& machine = *Machine::current;
    machine.step();  // compare and sleep are one step, as in the kernel
    machine.observe(word.value == seen);
    if (word.value == seen) machine.sleep_on(&word);
  }
};

using ModelBell = EventCount<Model>;

// The code and the shared state of the fibers of one run.
class Protocol {
 public:
  virtual ~Protocol() = default;
  virtual void run(Machine& machine, int fiber) = 0;
  // Checks the end state of a run without a failure. Returns an error text, "" if the state is right.
  virtual std::string judge() const { return ""; }
};

struct Search {
  int fibers = 2;
  int slots = 0;
  bool lose_wakes = false;  // a broken platform
  int preemptions = -1;     // upper limit; -1: no limit
  std::function<std::unique_ptr<Protocol>()> make;
};

struct Verdict {
  std::string failure;  // of the first schedule with an error
  size_t states = 0;
  size_t ends = 0;  // number of schedules that ran to their end
};

// Depth-first search over all schedules. Each schedule runs from the start.
class Explorer {
 public:
  explicit Explorer(const Search& search) : search_(search) {}

  Verdict explore() {
    Verdict verdict;
    for (;;) {
      Machine machine;
      Machine::current = &machine;
      machine.lose_wakes = search_.lose_wakes;
      machine.slots.resize(search_.slots);
      const auto protocol = search_.make();
      for (int fiber = 0; fiber < search_.fibers; ++fiber) {
        machine.add([&machine, &protocol, fiber] { protocol->run(machine, fiber); });
      }
      if (run(machine) || !machine.failure.empty()) {
        ++verdict.ends;
        verdict.failure = !machine.failure.empty() ? machine.failure
                          : !machine.all_done()    ? "ranks sleep forever"
                                                   : protocol->judge();
        if (!verdict.failure.empty()) return verdict;
      }
      while (!path_.empty() && path_.back().taken + 1 == path_.back().enabled.size()) path_.pop_back();
      verdict.states = seen_.size();
      if (path_.empty()) return verdict;
      ++path_.back().taken;
    }
  }

 private:
  struct Choice {
    std::vector<int> enabled;
    size_t taken = 0;
  };

  // Follows the path, then continues to the end (true) or to a state that was visited before (false).
  bool run(Machine& machine) {
    last_ = -1;
    preempted_ = 0;
    for (const Choice& choice : path_) go(machine, choice.enabled[choice.taken]);
    while (machine.failure.empty() && seen_.insert(state(machine)).second) {
      auto enabled = choices(machine);
      if (enabled.empty()) return true;
      go(machine, enabled[0]);
      path_.push_back({std::move(enabled), 0});
    }
    return false;
  }
  void go(Machine& machine, int fiber) {
    const auto enabled = machine.enabled();
    const bool could_go_on = std::ranges::find(enabled, last_) != enabled.end();
    preempted_ += last_ >= 0 && fiber != last_ && could_go_on;
    last_ = fiber;
    machine.run(fiber);
  }
  std::vector<int> choices(const Machine& machine) const {
    auto enabled = machine.enabled();
    const auto last = std::ranges::find(enabled, last_);
    if (search_.preemptions < 0 || last == enabled.end()) return enabled;
    if (preempted_ == search_.preemptions) return {last_};
    std::iter_swap(enabled.begin(), last);
    return enabled;
  }
  uint64_t state(const Machine& machine) const {
    if (search_.preemptions < 0) return machine.hash();
    Hash hash;
    hash.add(machine.hash());
    hash.add(last_);
    hash.add(preempted_);
    return hash.value();
  }

  const Search& search_;
  std::vector<Choice> path_;
  std::unordered_set<uint64_t> seen_;
  int last_ = -1, preempted_ = 0;
};

std::string failure_of(const Search& search) { return Explorer(search).explore().failure; }

void expect_right(const char* name, const Search& search) {
  const Verdict verdict = Explorer(search).explore();
  EXPECT_EQ(verdict.failure, "") << name;
  EXPECT_GT(verdict.states, 100U);
  EXPECT_GT(verdict.ends, 0U);
  std::printf("  %s: %zu states\n", name, verdict.states);
}

// ---- rounds ----

struct Meeting {
  int ranks = 2;
  int rounds = 3;
  int looks = 1;
  int slots_each = 2;   // 1: a broken protocol, in which the search must find an error
  int breaks_off = -1;  // this rank aborts the group instead of its last round; -1: none
  uint64_t first = 0;
};

class Meet final : public Protocol {
 public:
  explicit Meet(const Meeting& meeting) : meeting_(meeting), bells_(meeting.ranks), finished_(meeting.ranks) {
    words_.done.value = static_cast<uint32_t>(meeting.first);
  }

  void run(Machine& machine, int rank) override {
    std::vector<ModelBell*> bells;
    for (auto& bell : bells_) bells.push_back(&bell);
    Rounds<Model, ModelBell> rounds(words_, bells, rank, meeting_.first);
    try {
      for (int i = 0; i < meeting_.rounds; ++i) {
        if (rank == meeting_.breaks_off && i == meeting_.rounds - 1) return rounds.abort_group();
        machine.forget_all_but(rounds.next());
        machine.write_slot(slot_of(rank, rounds.next()), rounds.next() * 10 + rank);
        rounds.arrive();
        ModelWaiter waiter{meeting_.looks};
        bells_[rank].wait(waiter, [&] { return is_complete(rounds); });
        for (int other = 0; other < meeting_.ranks; ++other) {
          if (machine.read_slot(slot_of(other, rounds.round())) != rounds.round() * 10 + other) {
            machine.fail("a wrong value");
          }
        }
        ++finished_[rank];
      }
    } catch (const Broken&) {
      if (meeting_.breaks_off < 0) machine.fail("broken for no reason");
    }
  }

  std::string judge() const override {
    const auto wanted = static_cast<uint64_t>(meeting_.rounds - (meeting_.breaks_off >= 0 ? 1 : 0));
    for (const uint64_t finished : finished_) {
      if (meeting_.breaks_off < 0 ? finished != wanted : finished > wanted) return "a rank ended too early or too late";
    }
    return "";
  }

 private:
  int slot_of(int rank, uint64_t round) const { return rank * 2 + static_cast<int>(round % meeting_.slots_each); }
  static bool is_complete(const Rounds<Model, ModelBell>& rounds) {
    const RoundState state = rounds.state();
    if (state == RoundState::kBroken) throw Broken{};
    return state == RoundState::kComplete;
  }

  Meeting meeting_;
  RoundWords<Model> words_;
  std::deque<ModelBell> bells_;
  std::vector<uint64_t> finished_;  // number of rounds, of each rank
};

Search search_of(const Meeting& meeting, int preemptions = -1) {
  return {.fibers = meeting.ranks, .slots = 2 * meeting.ranks, .preemptions = preemptions, .make = [meeting] {
            return std::make_unique<Meet>(meeting);
          }};
}

TEST(ShmModel, TwoRanksCompleteTheirRoundsUnderEverySchedule) {
  for (const int looks : {0, 1}) {
    expect_right("2 ranks, 4 rounds", search_of({.ranks = 2, .rounds = 4, .looks = looks}));
  }
}

TEST(ShmModel, ThreeRanksCompleteTheirRoundUnderEverySchedule) {
  expect_right("3 ranks, 1 round", search_of({.ranks = 3, .rounds = 1, .looks = 0}));
}

// In round 3 the slots of round 1 are written again.
TEST(ShmModel, ThreeRanksReuseTheirSlots) {
  expect_right("3 ranks, 3 rounds", search_of({.ranks = 3, .rounds = 3, .looks = 0}, 2));
}

TEST(ShmModel, TheRoundNumberMayWrapAround) {
  expect_right("2 ranks, wrapping", search_of({.ranks = 2, .rounds = 3, .looks = 0, .first = (uint64_t{1} << 32) - 2}));
}

TEST(ShmModel, AbortEndsEveryWaitUnderEverySchedule) {
  for (const int rank : {0, 1}) {
    expect_right("2 ranks, broken off", search_of({.ranks = 2, .rounds = 3, .looks = 1, .breaks_off = rank}));
  }
  expect_right("3 ranks, broken off", search_of({.ranks = 3, .rounds = 1, .looks = 0, .breaks_off = 2}));
  expect_right("3 ranks, broken off in round 2", search_of({.ranks = 3, .rounds = 2, .looks = 0, .breaks_off = 1}, 2));
}

TEST(ShmModel, TheSearchFindsALostWakeUp) {
  Search search = search_of({.ranks = 2, .rounds = 1, .looks = 0});
  search.lose_wakes = true;
  EXPECT_EQ(failure_of(search), "ranks sleep forever");
}

TEST(ShmModel, TheSearchFindsThatOneSlotIsNotEnough) {
  EXPECT_NE(failure_of(search_of({.ranks = 2, .rounds = 2, .looks = 0, .slots_each = 1})), "");
  EXPECT_NE(failure_of(search_of({.ranks = 3, .rounds = 2, .looks = 0, .slots_each = 1}, 2)), "");
}

// ---- messages ----

// Fiber 0 sends chunks to fiber 1. `room` is the number of chunks that the memory really holds.
class SendChunks final : public Protocol {
 public:
  SendChunks(int chunks, int room) : chunks_(chunks), room_(room) {}

  void run(Machine& machine, int rank) override {
    for (int i = 0; i < chunks_; ++i) {
      machine.forget_all_but(i);
      ModelWaiter waiter{i % 2};
      if (rank == 0) {
        bells_[0].wait(waiter, [&] { return ring_.has_room(); });
        machine.write_slot(i % room_, i);
        ring_.put(bells_[1]);
      } else {
        bells_[1].wait(waiter, [&] { return ring_.has_chunk(); });
        if (machine.read_slot(i % room_) != static_cast<uint64_t>(i)) machine.fail("a wrong chunk");
        ring_.take(bells_[0]);
      }
    }
  }

 private:
  int chunks_, room_;
  Ring<Model, ModelBell> ring_;
  ModelBell bells_[2];
};

Search search_of_chunks(int chunks, int room, int preemptions = -1) {
  return {.fibers = 2, .slots = room, .preemptions = preemptions, .make = [=] {
            return std::make_unique<SendChunks>(chunks, room);
          }};
}

TEST(ShmModel, ChunksOfMessagesArriveUnderEverySchedule) {
  expect_right("3 chunks", search_of_chunks(3, Ring<Model, ModelBell>::kChunks));
  expect_right("6 chunks", search_of_chunks(6, Ring<Model, ModelBell>::kChunks, 3));
}

TEST(ShmModel, TheSearchFindsThatTheRingIsTooSmall) {
  EXPECT_NE(failure_of(search_of_chunks(3, 1)), "");
  Search search = search_of_chunks(3, 2);
  search.lose_wakes = true;
  EXPECT_EQ(failure_of(search), "ranks sleep forever");
}

// ---- reading in place ----

// Fiber 0 owns memory, aborts its group, and frees the memory when no fiber reads the memory any more. Fiber 1 reads
// the memory.
class ReadInPlace final : public Protocol {
 public:
  explicit ReadInPlace(bool waits_for_readers) : waits_(waits_for_readers) {}

  void run(Machine& machine, int rank) override {
    if (rank == 0) {
      broken_.store(1);
      while (waits_ && readers_.are_there()) machine.forget_all_but(1);
      machine.write_slot(0, kFreed);
      return;
    }
    for (int i = 0; i < 2; ++i) {
      machine.forget_all_but(i);
      if (!readers_.enter(broken_)) return;
      const uint64_t seen = machine.read_slot(0);
      if (readers_.leave(broken_) && seen == kFreed) machine.fail("what was freed is taken for data");
    }
  }

 private:
  static constexpr uint64_t kFreed = 99;
  bool waits_;
  Model::Word32 broken_;
  InPlaceReaderCount<Model> readers_;
};

Search search_of_reads(bool waits_for_readers) {
  return {.fibers = 2, .slots = 1, .make = [=] { return std::make_unique<ReadInPlace>(waits_for_readers); }};
}

TEST(ShmModel, MemoryIsFreedAfterTheLastReadUnderEverySchedule) {
  const Verdict verdict = Explorer(search_of_reads(true)).explore();
  EXPECT_EQ(verdict.failure, "");
  EXPECT_GT(verdict.ends, 1U);
}

TEST(ShmModel, TheSearchFindsThatMemoryIsFreedWhileItIsRead) { EXPECT_NE(failure_of(search_of_reads(false)), ""); }

// ---- the worker thread ----

// Rank 0 starts a call, registers its worker, checks the round once more and returns. Rank 1 arrives. Fiber 2 is the
// worker of rank 0, which must complete the round. The code under the engine's lock has no steps in between.
struct HandOverRules {
  bool looks_once_more = true;
  bool hears_of_vain_wakes = true;  // rings for a worker that woke while the caller was still driving
};

class HandOver final : public Protocol {
 public:
  explicit HandOver(const HandOverRules& rules) : rules_(rules) {
    for (auto& bells : bells_) all_.push_back(&bells);
  }

  void run(Machine& machine, int fiber) override {
    if (fiber == 2) return work(machine);
    Rounds<Model> rounds(words_, all_, fiber);
    if (fiber == 1) return rounds.arrive();
    EventCount<Model>& bell = bells_[0].worker;
    driven_.value = 1;
    rounds.arrive();
    bell.register_sleeper();
    worker_registered_.value = 1;
    const bool moved = rules_.looks_once_more && rounds.complete();
    machine.step();
    const bool rings = moved || (rules_.hears_of_vain_wakes && woke_while_driven_.value != 0);
    driven_.value = 0;
    if (rings) bell.ring_unconditionally();
  }

 private:
  void work(Machine& machine) {
    EventCount<Model>& bell = bells_[0].worker;
    for (;;) {
      machine.forget_all_but(0);
      const uint32_t seen = bell.count.load();
      machine.step();
      machine.observe(worker_registered_.value * 2 + driven_.value);
      if (worker_registered_.value != 0 && driven_.value != 0) {
        woke_while_driven_.value = 1;
      } else if (worker_registered_.value != 0 && words_.done.load() == 1) {
        return;
      }
      ModelWaiter().sleep(bell.count, seen);
    }
  }

  HandOverRules rules_;
  RoundWords<Model> words_;
  RankEventCounts<Model> bells_[2];
  std::vector<RankEventCounts<Model>*> all_;
  Model::Word32 driven_, worker_registered_, woke_while_driven_;
};

Search search_of(const HandOverRules& rules) {
  return {.fibers = 3, .make = [rules] { return std::make_unique<HandOver>(rules); }};
}

TEST(ShmModel, RegisteredWorkerCompletesTheRoundUnderEverySchedule) {
  expect_right("a worker", search_of(HandOverRules{}));
}

TEST(ShmModel, TheSearchFindsAWorkerThatIsNeverWoken) {
  EXPECT_EQ(failure_of(search_of(HandOverRules{.looks_once_more = false})), "ranks sleep forever");
  EXPECT_EQ(failure_of(search_of(HandOverRules{.hears_of_vain_wakes = false})), "ranks sleep forever");
}

}  // namespace
}  // namespace tessera::comm::shm
