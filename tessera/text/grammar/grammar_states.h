// A lazy automaton that reads the texts of a grammar byte by byte. A state is created when a text first reaches it.
//
//   GrammarStates states(grammar);
//   int32_t state = states.start();
//   for (const char byte : text) state = states.next(state, byte);
//   const bool whole = states.accepts(state);
//
// A state is the set of all positions in the grammar that the text read so far can have. Its cost is the number of its
// positions, which steps() counts. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "tessera/text/grammar/grammar.h"

namespace tessera::text {

// A hash table from objects to ids that stores only hashes and ids; the caller owns the objects and compares them.
class HashIdTable {
 public:
  // Returns the id that was added with this hash and for which is_wanted(id) is true; -1 if there is none.
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
  std::vector<Slot> slots_;  // the size is a power of two
  size_t used_ = 0;
};

class GrammarStates {
 public:
  static constexpr int32_t kDead = -1;  // the state from which no text can be completed
  static constexpr size_t kMostReadings = 20'000;
  static constexpr size_t kMostBytes = size_t{64} << 20;

  // Makes the start state. The constructor, next() and keep() throw Error kConfig when the text read so far can be at
  // more than kMostReadings positions of the grammar, or when all states together use more than kMostBytes.
  explicit GrammarStates(Grammar grammar);

  int32_t start() const { return start_; }
  int32_t next(int32_t state, uint8_t byte);
  bool accepts(int32_t state) const { return state >= 0 && states_[static_cast<size_t>(state)].accepts; }
  // True when no byte may follow.
  bool ends(int32_t state) const { return state < 0 || states_[static_cast<size_t>(state)].item_count == 0; }

  // Drops all states except the start and `states`. States get new numbers, which are written to `states`.
  void keep(std::span<int32_t* const> states);
  size_t bytes() const;                      // memory of the states, without the grammar
  uint64_t steps() const { return steps_; }  // positions read so far, plus kStateSteps per created state

 private:
  using PartId = Grammar::PartId;
  // The number of a position in the grammar. A position is a place in one part and the Item that follows this part, so
  // it is a stack of parts. Equal stacks have the same number, so Items whose stacks end alike share that end.
  using Item = int32_t;
  static constexpr Item kNothing = -1;     // the empty stack: the end of the text
  static constexpr int32_t kUnknown = -2;  // AutomatonState::next: not computed yet
  struct ItemData {
    PartId part;
    int32_t at;     // done bytes of a literal, children of a sequence, rounds of a repeat; or the place in a tree
    Item tail;      // the item that follows; its number is smaller than this item's
    uint32_t seen;  // number of the last closure that contains the item
  };
  struct AutomatonState {
    uint32_t first, item_count;  // range of state_items_: the items of the state, each of which expects a byte
    bool accepts;
    std::array<int32_t, 256> next;  // by byte: a state, kDead or kUnknown
  };

  const Grammar::Node& node(PartId part) const { return grammar_.parts_->nodes[static_cast<size_t>(part)]; }
  Item item(PartId part, int32_t at, Item tail);
  Item item_at_start(PartId part, Item tail);  // the item at the beginning of `part`
  void push(Item item);                        // adds an item to the current closure; kNothing: the text may end
  void read();
  void expand_item(Item item);
  void consume_byte(Item item, uint8_t byte);
  void intersect_equivalent_bytes(Item item, uint8_t byte, ByteSet& equal) const;
  int32_t find_or_add_state();
  void begin_closure();

  Grammar grammar_;
  std::deque<ItemData> items_;
  HashIdTable item_ids_;
  std::deque<Item> state_items_;
  std::deque<AutomatonState> states_;
  HashIdTable state_ids_;
  int32_t start_ = kDead;
  uint64_t steps_ = 0;

  // The current closure: the items that the items of one state expand to.
  uint32_t closure_id_ = 0;                 // its number
  size_t closure_size_ = 0;                 // number of items visited
  std::vector<Item> pending_, byte_items_;  // items to expand; items that expect a byte
  bool accepts_ = false;
};

}  // namespace tessera::text
