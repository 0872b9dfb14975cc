#include "tessera/text/grammar/grammar.h"

#include <algorithm>
#include <set>

#include "tessera/base/error.h"

namespace tessera::text {

Grammar::Part GrammarBuilder::add(Grammar::Node node) {
  grammar_.nodes_.push_back(std::move(node));
  return static_cast<Part>(grammar_.nodes_.size() - 1);
}

Grammar::Part GrammarBuilder::bytes(const ByteSet& set) {
  if (const auto known = sets_.find(set); known != sets_.end()) return known->second;
  grammar_.sets_.push_back(set);
  return sets_[set] = add({.kind = Grammar::Kind::kBytes, .set = static_cast<int32_t>(grammar_.sets_.size() - 1)});
}

Grammar::Part GrammarBuilder::range(int first, int last) {
  ByteSet set;
  for (int byte = first; byte <= last; ++byte) set.set(static_cast<size_t>(byte));
  return bytes(set);
}

Grammar::Part GrammarBuilder::literal(std::string_view text) {
  std::vector<Part> parts;
  for (const char each : text) {
    const int byte = static_cast<unsigned char>(each);
    parts.push_back(range(byte, byte));
  }
  return sequence(std::move(parts));
}

Grammar::Part GrammarBuilder::sequence(std::vector<Part> parts) {
  return add({.kind = Grammar::Kind::kSequence, .parts = std::move(parts)});
}

Grammar::Part GrammarBuilder::choice(std::vector<Part> parts) {
  return add({.kind = Grammar::Kind::kChoice, .parts = std::move(parts)});
}

Grammar::Part GrammarBuilder::repeat(Part part, int32_t least, int32_t most) {
  return add({.kind = Grammar::Kind::kRepeat, .parts = {part}, .least = least, .most = most});
}

Grammar::Part GrammarBuilder::forward() { return add({.kind = Grammar::Kind::kForward}); }

void GrammarBuilder::define(Part forward, Part as) {
  auto& node = grammar_.nodes_[static_cast<size_t>(forward)];
  TESSERA_CHECK(node.kind == Grammar::Kind::kForward && node.parts.empty(), ErrorKind::kInternal,
                "[text.grammar] part {} cannot be defined, or is already", forward);
  node.parts = {as};
}

Grammar GrammarBuilder::finish(Part root) && {
  grammar_.root_ = root;
  return std::move(grammar_);
}

// All that may come next, as it is found.
struct GrammarStates::Reading {
  Open open{};
  bool accepts = false;
  std::set<std::pair<Grammar::Part, Rest>> seen{};
};

GrammarStates::GrammarStates(Grammar grammar) : grammar_(std::move(grammar)) {
  Reading reading;
  read(grammar_.root_, kNothing, reading);
  start_ = state_of(std::move(reading));
}

GrammarStates::Rest GrammarStates::link(Grammar::Part part, Rest tail) {
  const auto [at, fresh] = link_ids_.try_emplace({part, tail}, static_cast<Rest>(links_.size()));
  if (fresh) links_.push_back({part, tail});
  return at->second;
}

Grammar::Part GrammarStates::repeat(Grammar::Part part, int32_t least, int32_t most) {
  const auto [at, fresh] =
      repeats_.try_emplace({part, least, most}, static_cast<Grammar::Part>(grammar_.nodes_.size()));
  if (fresh) {
    grammar_.nodes_.push_back({.kind = Grammar::Kind::kRepeat, .parts = {part}, .least = least, .most = most});
  }
  return at->second;
}

// Goes through what needs no byte, with a list of what is still to be read instead of calls: a text may nest deeply.
void GrammarStates::read(Grammar::Part first, Rest after, Reading& reading) {
  constexpr size_t kMostReadings = 20'000;
  std::vector<std::pair<Grammar::Part, Rest>> pending = {{first, after}};
  const auto go_on = [&](Rest rest) {
    if (rest == kNothing) {
      reading.accepts = true;
    } else {
      const auto [part, tail] = links_[static_cast<size_t>(rest)];
      pending.emplace_back(part, tail);
    }
  };
  while (!pending.empty()) {
    const auto [part, rest] = pending.back();
    pending.pop_back();
    if (!reading.seen.emplace(part, rest).second) continue;
    TESSERA_CHECK(reading.seen.size() <= kMostReadings, ErrorKind::kConfig,
                  "[text.grammar] the grammar has over {} readings of one place. Make it simpler.", kMostReadings);
    const auto node = grammar_.nodes_[static_cast<size_t>(part)];  // a copy: repeat() adds others
    switch (node.kind) {
      case Grammar::Kind::kBytes:
        reading.open.emplace_back(node.set, rest);
        break;
      case Grammar::Kind::kSequence: {
        Rest tail = rest;
        for (size_t i = node.parts.size(); i-- > 0;) tail = link(node.parts[i], tail);
        go_on(tail);
        break;
      }
      case Grammar::Kind::kForward:
      case Grammar::Kind::kChoice:
        for (const auto each : node.parts) pending.emplace_back(each, rest);
        break;
      case Grammar::Kind::kRepeat: {
        if (node.least == 0) go_on(rest);
        if (node.most == 0) break;
        const auto most = node.most == Grammar::kEndless ? node.most : node.most - 1;
        const auto more = repeat(node.parts[0], std::max(node.least - 1, 0), most);
        pending.emplace_back(node.parts[0], link(more, rest));
        break;
      }
    }
  }
}

int32_t GrammarStates::state_of(Reading reading) {
  auto& open = reading.open;
  if (open.empty() && !reading.accepts) return kDead;
  std::sort(open.begin(), open.end());
  open.erase(std::unique(open.begin(), open.end()), open.end());
  const auto [at, fresh] = state_ids_.try_emplace({open, reading.accepts}, static_cast<int32_t>(states_.size()));
  if (fresh) {
    constexpr size_t kMostBytes = size_t{256} << 20;
    bytes_ += sizeof(State) + 2 * open.size() * sizeof(Open::value_type);
    TESSERA_CHECK(bytes_ <= kMostBytes, ErrorKind::kConfig,
                  "[text.grammar] the states of the grammar take over {} MB. Make it simpler.", kMostBytes >> 20);
    auto& state = states_.emplace_back(State{.open = std::move(open), .accepts = reading.accepts});
    state.next.fill(kUnknown);
  }
  return at->second;
}

int32_t GrammarStates::next(int32_t state, uint8_t byte) {
  if (state == kDead) return kDead;
  const auto index = static_cast<size_t>(state);
  if (states_[index].next[byte] != kUnknown) return states_[index].next[byte];
  Reading reading;
  const auto open = states_[index].open;
  for (const auto& [set, rest] : open) {
    if (!grammar_.sets_[static_cast<size_t>(set)].test(byte)) continue;
    if (rest == kNothing) {
      reading.accepts = true;
    } else {
      const auto [part, tail] = links_[static_cast<size_t>(rest)];
      read(part, tail, reading);
    }
  }
  const int32_t found = state_of(std::move(reading));
  states_[index].next[byte] = found;
  return found;
}

}  // namespace tessera::text
