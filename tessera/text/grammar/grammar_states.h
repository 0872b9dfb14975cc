// The texts of a grammar, byte by byte: an automaton whose states are made when a text first comes to them.
//
//   GrammarStates states(grammar);
//   int32_t state = states.start();
//   for (const char byte : text) state = states.next(state, byte);
//   const bool whole = states.accepts(state);
//
// A state is the set of places in the grammar at which a text may be. Its cost is that of its places, which steps()
// counts. For one thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "tessera/text/grammar/grammar.h"

namespace tessera::text {

// Numbers by the hash of what they stand for.
class HashedIds {
 public:
  // The number of the hash for which is_wanted(number) holds; -1 where there is none.
  template <class IsWanted>
  int32_t find(uint64_t hash, IsWanted is_wanted) const {
    if (slots_.empty()) return -1;
    const size_t mask = slots_.size() - 1;
    for (size_t at = hash & mask; slots_[at].id >= 0; at = (at + 1) & mask) {
      if (slots_[at].hash == static_cast<uint32_t>(hash) && is_wanted(slots_[at].id)) return slots_[at].id;
    }
    return -1;
  }
  void add(uint64_t hash, int32_t id);
  size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    uint32_t hash = 0;
    int32_t id = -1;
  };
  void put(const Slot& slot);
  std::vector<Slot> slots_;  // a power of two
  size_t used_ = 0;
};

class GrammarStates {
 public:
  static constexpr int32_t kDead = -1;  // no text goes on from here
  static constexpr size_t kMostReadings = 20'000;
  static constexpr size_t kMostBytes = size_t{64} << 20;

  // Error kConfig (here, in next and in keep): one place has over kMostReadings readings, or all states take over
  // kMostBytes.
  explicit GrammarStates(Grammar grammar);

  int32_t start() const { return start_; }
  int32_t next(int32_t state, uint8_t byte);
  bool accepts(int32_t state) const { return state >= 0 && states_[static_cast<size_t>(state)].accepts; }
  // Nothing may follow.
  bool ends(int32_t state) const { return state < 0 || states_[static_cast<size_t>(state)].places == 0; }

  // Forgets all states but the start and these, which get other numbers.
  void keep(std::span<int32_t* const> states);
  size_t bytes() const;                      // of the states, without the grammar
  uint64_t steps() const { return steps_; }  // places that were read so far, and a share for each state

 private:
  using Part = Grammar::Part;
  using Item = int32_t;  // a place in the grammar: what is wanted there, and what is wanted behind
  static constexpr Item kNothing = -1;
  static constexpr int32_t kUnknown = -2;
  // What is left of a part, and then another item. `at`: bytes of a literal, parts of a sequence or rounds of a repeat
  // that are done; the place in a tree.
  struct ItemData {
    Part part;
    int32_t at;
    Item tail;
    uint32_t seen;  // by the reading of that number
  };
  struct State {
    uint32_t first, places;  // in open_: items that begin with a byte
    bool accepts;
    std::array<int32_t, 256> next;
  };

  const Grammar::Node& node(Part part) const { return grammar_.parts_->nodes[static_cast<size_t>(part)]; }
  Item item(Part part, int32_t at, Item tail);
  Item begun(Part part, Item tail);  // from its beginning
  void push(Item item);              // kNothing: the text may end
  void read();
  void read_item(Item item);
  void step_over(Item item, uint8_t byte);
  void keep_equal_bytes(Item item, uint8_t byte, ByteSet& equal) const;
  int32_t state_of_reading();
  void begin_reading();

  Grammar grammar_;
  std::deque<ItemData> items_;
  HashedIds item_ids_;
  std::deque<Item> open_;
  std::deque<State> states_;
  HashedIds state_ids_;
  int32_t start_ = kDead;
  uint64_t steps_ = 0;

  // Of the reading at work: what may come next.
  uint32_t reading_ = 0;
  size_t readings_ = 0;
  std::vector<Item> pending_, found_;
  bool accepts_ = false;
};

}  // namespace tessera::text
