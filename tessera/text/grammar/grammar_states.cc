#include "tessera/text/grammar/grammar_states.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::text {
namespace {

constexpr uint64_t kStateSteps = 16;  // extra steps for each state, because its table `next` has a kilobyte

uint64_t mixed(uint64_t value) {
  value = (value ^ value >> 31) * 0x7fb5d329728ea185;
  value = (value ^ value >> 27) * 0x81dadef4bc2dd44d;
  return value ^ value >> 33;
}

uint64_t hash_with(uint64_t hash, int32_t value) {
  return mixed(hash + 0x9e3779b97f4a7c15 + static_cast<uint32_t>(value));
}

}  // namespace

void HashIdTable::put(const Slot& slot) {
  const size_t mask = slots_.size() - 1;
  size_t at = slot.hash & mask;
  while (slots_[at].id >= 0) at = (at + 1) & mask;
  slots_[at] = slot;
}

// The number of slots doubles before more than two thirds of them are used. Each slot holds the hash of its object, so
// HashIdTable can double without the objects, which the caller owns.
void HashIdTable::add(uint64_t hash, int32_t id) {
  if (++used_ * 3 > slots_.size() * 2) {
    std::vector<Slot> before(std::max<size_t>(16, slots_.size() * 2));
    before.swap(slots_);
    for (const auto& slot : before) {
      if (slot.id >= 0) put(slot);
    }
  }
  put({static_cast<uint32_t>(hash), id});
}

GrammarStates::GrammarStates(Grammar grammar) : grammar_(std::move(grammar)) {
  begin_closure();
  push(item_at_start(grammar_.parts_->root, kNothing));
  read();
  start_ = find_or_add_state();
}

size_t GrammarStates::bytes() const {
  return items_.size() * sizeof(ItemData) + state_items_.size() * sizeof(Item) +
         states_.size() * sizeof(AutomatonState) + item_ids_.bytes() + state_ids_.bytes() +
         (pending_.capacity() + byte_items_.capacity()) * sizeof(Item);
}

// Returns the number of the item with this content, and creates the item when it is new. Equal items thus have equal
// numbers, and states can be compared by their sorted item numbers.
GrammarStates::Item GrammarStates::item(PartId part, int32_t at, Item tail) {
  const auto hash = hash_with(hash_with(mixed(static_cast<uint32_t>(part)), at), tail);
  const auto known = item_ids_.find(hash, [&](Item id) {
    const auto& data = items_[static_cast<size_t>(id)];
    return data.part == part && data.at == at && data.tail == tail;
  });
  if (known >= 0) return known;
  const auto id = static_cast<Item>(items_.size());
  items_.push_back({part, at, tail, 0});
  item_ids_.add(hash, id);
  return id;
}

GrammarStates::Item GrammarStates::item_at_start(PartId part, Item tail) {
  const auto kind = node(part).kind;
  const bool tree = kind == Grammar::NodeKind::kOneOf || kind == Grammar::NodeKind::kNoneOf;
  return item(part, tree ? RadixTree::kRoot : 0, tail);
}

// Starts a new closure with a new closure_id_. An item is in the closure if its `seen` equals closure_id_, so no array
// of flags must be cleared.
void GrammarStates::begin_closure() {
  if (++closure_id_ == 0) {  // the counter has wrapped around
    for (auto& each : items_) each.seen = 0;
    closure_id_ = 1;
  }
  closure_size_ = 0;
  accepts_ = false;
  pending_.clear();
  byte_items_.clear();
}

// Adds an item to the closure if the closure does not contain it. Each item is thus expanded once per closure, so the
// expansion is finite; kMostReadings limits the number of items.
void GrammarStates::push(Item item) {
  ++steps_;
  if (item == kNothing) {
    accepts_ = true;
    return;
  }
  auto& seen = items_[static_cast<size_t>(item)].seen;
  if (seen == closure_id_) return;
  seen = closure_id_;
  TESSERA_CHECK(
      ++closure_size_ <= kMostReadings, ErrorKind::kConfig,
      "[text.grammar] the grammar has over {} readings at one position of a text. Make it simpler: fewer alternatives "
      "that begin alike.",
      kMostReadings);
  pending_.push_back(item);
}

// Expands the pending items until each one expects a byte. It uses a list instead of recursion, because the grammar may
// nest deeply.
void GrammarStates::read() {
  while (!pending_.empty()) {
    const auto item = pending_.back();
    pending_.pop_back();
    expand_item(item);
  }
}

// Expands one item by one level. An item that can read a byte is added to byte_items_. The items that the item leads to
// without reading a byte (items of its children, or its tail where it may end) are pushed to pending_. The item of the
// last child of a sequence, or of the last round of a repeat, gets the tail of its parent as its tail (like a tail
// call), so the chains of tails stay short. The rounds of a repeat without maximum are counted only up to its minimum,
// so the number of items is finite.
void GrammarStates::expand_item(Item of) {
  using NodeKind = Grammar::NodeKind;
  const auto [part, at, tail, seen] = items_[static_cast<size_t>(of)];
  const auto here = node(part);
  const auto& parts = *grammar_.parts_;
  switch (here.kind) {
    case NodeKind::kBytes:
    case NodeKind::kLiteral:
      byte_items_.push_back(of);
      return;
    case NodeKind::kOneOf: {
      const auto& tree = parts.trees[static_cast<size_t>(here.first)];
      if (tree.is_end(at)) push(tail);
      if (tree.has_continuation(at)) byte_items_.push_back(of);
      return;
    }
    case NodeKind::kNoneOf: {
      const auto& other = parts.others[static_cast<size_t>(here.first)];
      byte_items_.push_back(of);
      const auto& tree = parts.trees[static_cast<size_t>(other.tree)];
      if (!tree.continues_with_non_ascii(at)) push(item_at_start(other.wide, tail));
      return;
    }
    case NodeKind::kSequence: {
      if (here.second == 0) return push(tail);
      const auto child = parts.lists[static_cast<size_t>(here.first + at)];
      return push(item_at_start(child, at + 1 == here.second ? tail : item(part, at + 1, tail)));
    }
    case NodeKind::kChoice:
      for (int32_t i = 0; i < here.second; ++i) {
        push(item_at_start(parts.lists[static_cast<size_t>(here.first + i)], tail));
      }
      return;
    case NodeKind::kForward:
      return push(item_at_start(here.first, tail));
    case NodeKind::kRepeat: {
      const bool endless = here.third == Grammar::kUnbounded;
      if (at >= here.second) push(tail);
      const auto done = endless ? std::min(at + 1, here.second) : at + 1;
      return push(item_at_start(here.first, !endless && done == here.third ? tail : item(part, done, tail)));
    }
  }
}

// Pushes the item that follows the item `of` after `byte`; pushes nothing when `of` does not accept `byte`.
void GrammarStates::consume_byte(Item of, uint8_t byte) {
  using NodeKind = Grammar::NodeKind;
  const auto [part, at, tail, seen] = items_[static_cast<size_t>(of)];
  const auto& here = node(part);
  const auto& parts = *grammar_.parts_;
  ++steps_;
  if (here.kind == NodeKind::kBytes) {
    if (parts.sets[static_cast<size_t>(here.first)].test(byte)) push(tail);
  } else if (here.kind == NodeKind::kLiteral) {
    if (static_cast<uint8_t>(parts.text[static_cast<size_t>(here.first + at)]) != byte) return;
    push(at + 1 == here.second ? tail : item(part, at + 1, tail));
  } else if (here.kind == NodeKind::kOneOf) {
    const auto place = parts.trees[static_cast<size_t>(here.first)].next(at, byte);
    if (place != RadixTree::kNoNode) push(item(part, place, tail));
  } else {
    const auto& other = parts.others[static_cast<size_t>(here.first)];
    const auto& tree = parts.trees[static_cast<size_t>(other.tree)];
    if (const auto place = tree.next(at, byte); place != RadixTree::kNoNode) {
      push(item(part, place, tail));
    } else if (tree.is_inside_character(at)) {
      return;  // the excluded text continues inside a character, which no other byte can complete here
    } else if (byte == other.end) {
      if (!tree.is_end(at)) push(tail);
    } else if (parts.sets[static_cast<size_t>(other.characters)].test(byte)) {
      push(item_at_start(other.after, tail));
    }
  }
}

// Removes from `equal` each byte that leads from the item `of` to other items than `byte` does. After this has been
// done for all items of a state, the bytes in `equal` lead to the same next state as `byte`, so next() fills its table
// for all of them at once.
void GrammarStates::intersect_equivalent_bytes(Item of, uint8_t byte, ByteSet& equal) const {
  using NodeKind = Grammar::NodeKind;
  const auto& data = items_[static_cast<size_t>(of)];
  const auto& here = node(data.part);
  const auto& parts = *grammar_.parts_;
  const auto keep_part_of = [&](const ByteSet& set) { equal &= set.test(byte) ? set : ~set; };
  const auto keep_alone = [&] {
    equal.reset();
    equal.set(byte);
  };
  if (here.kind == NodeKind::kBytes) {
    keep_part_of(parts.sets[static_cast<size_t>(here.first)]);
  } else if (here.kind == NodeKind::kLiteral) {
    const auto wanted = static_cast<uint8_t>(parts.text[static_cast<size_t>(here.first + data.at)]);
    if (wanted == byte) {
      keep_alone();
    } else {
      equal.reset(wanted);
    }
  } else if (here.kind == NodeKind::kOneOf) {
    const auto next = parts.trees[static_cast<size_t>(here.first)].next_bytes(data.at);
    if (next.test(byte)) return keep_alone();
    equal &= ~next;
  } else {
    const auto& other = parts.others[static_cast<size_t>(here.first)];
    auto own_way = parts.trees[static_cast<size_t>(other.tree)].next_bytes(data.at);
    own_way.set(other.end);
    if (own_way.test(byte)) return keep_alone();
    equal &= ~own_way;
    keep_part_of(parts.sets[static_cast<size_t>(other.characters)]);
  }
}

// Returns the state that has exactly the items in byte_items_, and creates it when it is new.
int32_t GrammarStates::find_or_add_state() {
  if (byte_items_.empty() && !accepts_) return kDead;
  std::ranges::sort(byte_items_);
  uint64_t hash = accepts_ ? 1 : 2;
  for (const auto item : byte_items_) hash = hash_with(hash, item);
  const auto known = state_ids_.find(hash, [&](int32_t id) {
    const auto& state = states_[static_cast<size_t>(id)];
    if (state.accepts != accepts_ || state.item_count != byte_items_.size()) return false;
    return std::equal(byte_items_.begin(), byte_items_.end(), state_items_.begin() + state.first);
  });
  if (known >= 0) return known;
  const auto id = static_cast<int32_t>(states_.size());
  auto& state = states_.emplace_back();
  state.first = static_cast<uint32_t>(state_items_.size());
  state.item_count = static_cast<uint32_t>(byte_items_.size());
  state.accepts = accepts_;
  state.next.fill(kUnknown);
  state_items_.insert(state_items_.end(), byte_items_.begin(), byte_items_.end());
  state_ids_.add(hash, id);
  steps_ += kStateSteps;
  TESSERA_CHECK(bytes() <= kMostBytes, ErrorKind::kConfig,
                "[text.grammar] the states of the grammar take over {} MiB. Make the grammar simpler: fewer "
                "alternatives that begin alike, or shorter texts.",
                kMostBytes >> 20);
  return id;
}

// The subset construction, one transition at a time: every item of the state reads the byte, and the items that follow
// form the next state. The result is stored for all bytes that have the same effect.
int32_t GrammarStates::next(int32_t state, uint8_t byte) {
  if (state == kDead) return kDead;
  const auto index = static_cast<size_t>(state);
  if (states_[index].next[byte] != kUnknown) return states_[index].next[byte];
  begin_closure();
  ByteSet equal;
  equal.set();
  for (uint32_t i = 0; i < states_[index].item_count; ++i) {
    const auto item = state_items_[states_[index].first + i];
    consume_byte(item, byte);
    intersect_equivalent_bytes(item, byte, equal);
  }
  read();
  const int32_t found = find_or_add_state();
  for (size_t each = 0; each < equal.size(); ++each) {
    if (equal.test(each)) states_[index].next[each] = found;
  }
  return found;
}

// Garbage collection: marks the items of the kept states, and for each of them the chain of items that ItemData::tail
// links. Then creates the marked items and the states again in new tables. The tail of an item has a smaller number
// than the item, so creating items in ascending order finds the new number of each tail.
void GrammarStates::keep(std::span<int32_t* const> states) {
  std::vector<int32_t*> kept(states.begin(), states.end());
  kept.push_back(&start_);
  std::vector<Item> moved(items_.size(), kNothing);
  constexpr Item kWanted = 0;
  for (const auto* state : kept) {
    if (*state == kDead) continue;
    const auto& data = states_[static_cast<size_t>(*state)];
    for (uint32_t i = 0; i < data.item_count; ++i) {
      for (Item at = state_items_[data.first + i]; at != kNothing && moved[static_cast<size_t>(at)] == kNothing;) {
        moved[static_cast<size_t>(at)] = kWanted;
        at = items_[static_cast<size_t>(at)].tail;
      }
    }
  }
  const auto items = std::move(items_);
  const auto open = std::move(state_items_);
  const auto before = std::move(states_);
  items_ = {};
  state_items_ = {};
  states_ = {};
  item_ids_ = {};
  state_ids_ = {};
  const auto new_item = [&](Item old) { return old == kNothing ? kNothing : moved[static_cast<size_t>(old)]; };
  for (size_t i = 0; i < items.size(); ++i) {
    if (moved[i] != kNothing) moved[i] = item(items[i].part, items[i].at, new_item(items[i].tail));
  }
  // Creates each state in `kept` again from its items. The items need no expansion: a state stores only items that
  // expect a byte, and such items do not expand further.
  for (auto* state : kept) {
    if (*state == kDead) continue;
    const auto& data = before[static_cast<size_t>(*state)];
    begin_closure();
    accepts_ = data.accepts;
    for (uint32_t i = 0; i < data.item_count; ++i) byte_items_.push_back(new_item(open[data.first + i]));
    *state = find_or_add_state();
  }
  pending_.shrink_to_fit();
}

}  // namespace tessera::text
