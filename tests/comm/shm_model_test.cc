// The slot protocol of shared-memory groups under every schedule: the very code of rounds.h runs on fibers, each access
// to a shared word is a step, and a search visits every order of steps of the ranks. It looks for ranks that sleep
// forever, slots read before or overwritten after they should be (with vector clocks, so that an order that the atomics
// do not enforce counts as wrong even when it came out right), and wrong values. States seen before are not visited
// again.
#include <gtest/gtest.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <functional>
#include <memory>
#include <optional>
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

// One run of the ranks under one schedule.
class Machine {
 public:
  struct Word {
    uint64_t value = 0;
    Clock clock{};
  };
  struct Slot {
    uint64_t value = 0;
    Clock written{};                       // time of the last write
    std::array<Clock, kMaxFibers> read{};  // of the last reads
  };

  static inline Machine* current = nullptr;
  std::vector<Word*> words;
  std::vector<Slot> slots;
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
    return std::all_of(fibers_.begin(), fibers_.end(), [](const auto& fiber) { return fiber->done; });
  }
  // Runs fiber `index` up to its next step.
  void run(int index) {
    running_ = index;
    current = this;
    Fiber& fiber = *fibers_[index];
    if (_setjmp(scheduler_resume_) != 0) return;
    if (fiber.started) _longjmp(fiber.resume, 1);  // swapcontext(3) alone would cost two system calls a step
    fiber.started = true;
    ::setcontext(&fiber.context);
  }
  uint64_t hash() const {
    Hash hash;
    for (const Word* word : words) {
      hash.add(word->value);
      hash.add(word->clock);
    }
    for (const Slot& slot : slots) {
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

  // Called by the fibers.
  void step() {
    Fiber& fiber = self();
    fiber.history.add(3);
    if (_setjmp(fiber.resume) == 0) _longjmp(scheduler_resume_, 1);
  }
  void observe(uint64_t value) { self().history.add(value); }
  Clock& clock() { return self().clock; }
  void tick() { ++self().clock[running_]; }  // at each access to a slot
  // From here on the running fiber depends on `what` alone, not on what it has seen.
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
  // Accesses to slots are no steps: those that are not ordered by the words are found by their times, in any schedule.
  void write_slot(int index, uint64_t value) {
    tick();
    Slot& slot = slots[index];
    bool ordered = before(slot.written, clock());
    for (const Clock& read : slot.read) ordered = ordered && before(read, clock());
    if (!ordered) fail("a slot is overwritten while others may read it");
    slot.value = value;
    slot.written = clock();
    observe(1);
  }
  uint64_t read_slot(int index) {
    tick();
    Slot& slot = slots[index];
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

// The platform that rounds.h runs on.
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
  int looks = 0;  // before it sleeps
  bool spin() { return looks-- > 0; }
  void sleep(Model::Word32& word, uint32_t seen) {
    Machine& machine = *Machine::current;
    machine.step();  // comparing and falling asleep is one step, as in the kernel
    machine.observe(word.value == seen);
    if (word.value == seen) machine.sleep_on(&word);
  }
  [[noreturn]] void broken() { throw Broken{}; }
};

struct Setting {
  int ranks = 2;
  int rounds = 3;
  int looks = 1;
  int slots_each = 2;       // 1: a wrong protocol, which the search must reject
  bool lose_wakes = false;  // likewise
  int breaks_off = -1;      // this rank breaks the group off instead of its last round
  uint64_t first = 0;
};

struct Verdict {
  std::string failure;  // of the first wrong schedule
  size_t states = 0;
  size_t ends = 0;  // schedules that ran to their end
};

// What all ranks of one run share.
struct Shared {
  explicit Shared(const Setting& setting) {
    words.done.value = static_cast<uint32_t>(setting.first);
    finished.resize(setting.ranks);
  }
  RoundWords<Model> words;
  std::vector<uint64_t> finished;  // rounds, of each rank
};

void rank_body(Machine& machine, Shared& shared, const Setting& setting, int rank) {
  Rounds<Model> rounds(shared.words, setting.ranks, setting.first);
  const auto slot_of = [&](int of, uint64_t round) { return of * 2 + static_cast<int>(round % setting.slots_each); };
  try {
    for (int i = 0; i < setting.rounds; ++i) {
      if (rank == setting.breaks_off && i == setting.rounds - 1) return rounds.break_off();
      machine.forget_all_but(rounds.next());
      machine.write_slot(slot_of(rank, rounds.next()), rounds.next() * 10 + rank);
      rounds.arrive();
      ModelWaiter waiter{setting.looks};
      rounds.wait(waiter);
      for (int other = 0; other < setting.ranks; ++other) {
        if (machine.read_slot(slot_of(other, rounds.round())) != rounds.round() * 10 + other)
          machine.fail("a wrong value");
      }
      ++shared.finished[rank];
    }
  } catch (const Broken&) {
    if (setting.breaks_off < 0) machine.fail("broken for no reason");
  }
}

std::string judge_end(const Machine& machine, const Shared& shared, const Setting& setting) {
  if (!machine.failure.empty()) return machine.failure;
  if (!machine.all_done()) return "ranks sleep forever";
  const auto wanted = static_cast<uint64_t>(setting.rounds - (setting.breaks_off >= 0 ? 1 : 0));
  for (const uint64_t finished : shared.finished) {
    if (setting.breaks_off < 0 ? finished != wanted : finished > wanted) return "a rank ended too early or too late";
  }
  return "";
}

// Depth first over all schedules; each is run from the start.
Verdict explore(const Setting& setting) {
  struct Choice {
    std::vector<int> enabled;
    size_t taken = 0;
  };
  Verdict verdict;
  std::vector<Choice> path;
  std::unordered_set<uint64_t> seen;
  for (;;) {
    Machine machine;
    Machine::current = &machine;
    machine.lose_wakes = setting.lose_wakes;
    machine.slots.resize(2 * setting.ranks);
    Shared shared(setting);
    for (int rank = 0; rank < setting.ranks; ++rank) {
      machine.add([&machine, &shared, &setting, rank] { rank_body(machine, shared, setting, rank); });
    }
    for (const Choice& choice : path) machine.run(choice.enabled[choice.taken]);
    bool ended = false;
    while (seen.insert(machine.hash()).second && machine.failure.empty()) {
      auto enabled = machine.enabled();
      ended = enabled.empty();
      if (ended) break;
      machine.run(enabled[0]);
      path.push_back({std::move(enabled), 0});
    }
    if (ended || !machine.failure.empty()) {
      ++verdict.ends;
      verdict.failure = judge_end(machine, shared, setting);
      if (!verdict.failure.empty()) return verdict;
    }
    while (!path.empty() && path.back().taken + 1 == path.back().enabled.size()) path.pop_back();
    verdict.states = seen.size();
    if (path.empty()) return verdict;
    ++path.back().taken;
  }
}

void expect_right(const Setting& setting) {
  const Verdict verdict = explore(setting);
  EXPECT_EQ(verdict.failure, "") << setting.ranks << " ranks, " << setting.rounds << " rounds, " << setting.looks
                                 << " looks";
  EXPECT_GT(verdict.states, 100U);
  EXPECT_GT(verdict.ends, 0U);
  std::printf("  %d ranks, %d rounds, %d looks%s: %zu states\n", setting.ranks, setting.rounds, setting.looks,
              setting.breaks_off >= 0 ? ", broken off" : "", verdict.states);
}

TEST(ShmModel, TwoRanksMeetUnderEverySchedule) {
  for (const int looks : {0, 1}) {
    expect_right({.ranks = 2, .rounds = 4, .looks = looks});
  }
}

TEST(ShmModel, ThreeRanksMeetUnderEverySchedule) { expect_right({.ranks = 3, .rounds = 1, .looks = 0}); }

TEST(ShmModel, TheRoundNumberMayWrapAround) {
  expect_right({.ranks = 2, .rounds = 3, .looks = 0, .first = (uint64_t{1} << 32) - 2});
}

TEST(ShmModel, BreakingOffEndsEveryWaitUnderEverySchedule) {
  for (const int rank : {0, 1}) {
    expect_right({.ranks = 2, .rounds = 3, .looks = 1, .breaks_off = rank});
  }
  expect_right({.ranks = 3, .rounds = 1, .looks = 0, .breaks_off = 2});
}

TEST(ShmModel, TheSearchFindsALostWake) {
  EXPECT_EQ(explore({.ranks = 2, .rounds = 1, .looks = 0, .lose_wakes = true}).failure, "ranks sleep forever");
}

TEST(ShmModel, TheSearchFindsThatOneSlotIsNotEnough) {
  EXPECT_NE(explore({.ranks = 2, .rounds = 2, .looks = 0, .slots_each = 1}).failure, "");
}

}  // namespace
}  // namespace tessera::comm::shm
