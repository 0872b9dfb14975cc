// Which strings of bytes are wanted: sets of bytes, put together.
//
//   GrammarBuilder build;
//   const auto digit = build.range('0', '9');
//   const auto list = build.forward();                        // may contain itself
//   build.define(list, build.sequence({build.literal("["), build.optional(list), build.literal("]")}));
//   const Grammar grammar = std::move(build).finish(list);
//   GrammarStates states(grammar);
//   int32_t state = states.start();
//   for (const char byte : text) state = states.next(state, byte);
//   const bool whole = states.accepts(state);
//
// What is in other grammars regular or context-free is so here; what is ambiguous is followed in all its readings.
// A Grammar is immutable. GrammarStates makes a state when a text first comes to it, and is for one thread
// at a time.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::text {

using ByteSet = std::bitset<256>;

class Grammar {
 public:
  using Part = int32_t;  // of the grammar that made it

 private:
  friend class GrammarBuilder;
  friend class GrammarStates;
  enum class Kind : uint8_t { kBytes, kSequence, kChoice, kRepeat, kForward };
  struct Node {
    Kind kind;
    int32_t set = 0;                     // of kBytes
    std::vector<Part> parts{};           // of kSequence and kChoice; one of kRepeat; kForward's definition
    int32_t least = 0, most = kEndless;  // of kRepeat
  };
  static constexpr int32_t kEndless = -1;

  std::vector<Node> nodes_;
  std::vector<ByteSet> sets_;
  Part root_ = 0;
};

class GrammarBuilder {
 public:
  using Part = Grammar::Part;

  Part bytes(const ByteSet& set);
  Part range(int first, int last);      // one byte, both included
  Part literal(std::string_view text);  // "": nothing
  Part sequence(std::vector<Part> parts);
  Part choice(std::vector<Part> parts);
  Part optional(Part part) { return repeat(part, 0, 1); }
  Part many(Part part) { return repeat(part, 0); }  // or none
  Part repeat(Part part, int32_t least, int32_t most = Grammar::kEndless);
  // To be defined later, once. It may contain itself behind a byte, not as its beginning.
  Part forward();
  void define(Part forward, Part as);

  Grammar finish(Part root) &&;

 private:
  Part add(Grammar::Node node);
  Grammar grammar_;
  std::unordered_map<ByteSet, Part> sets_;
};

class GrammarStates {
 public:
  static constexpr int32_t kDead = -1;  // no text goes on from here

  // Error kConfig (here and in next): one place has over 20,000 readings, or all states take over 256 MB.
  explicit GrammarStates(Grammar grammar);

  int32_t start() const { return start_; }
  int32_t next(int32_t state, uint8_t byte);
  bool accepts(int32_t state) const { return state >= 0 && states_[static_cast<size_t>(state)].accepts; }
  // Nothing may follow.
  bool ends(int32_t state) const { return state < 0 || states_[static_cast<size_t>(state)].open.empty(); }
  size_t bytes() const { return bytes_; }  // of the states, about

 private:
  using Rest = int32_t;  // what is wanted after a part: a list, whose tails are shared
  static constexpr Rest kNothing = -1;
  static constexpr int32_t kUnknown = -2;
  struct Link {
    Grammar::Part part;
    Rest tail;
  };
  using Open = std::vector<std::pair<int32_t, Rest>>;  // sets of bytes that may come, and what follows each
  struct State {
    Open open{};
    bool accepts = false;
    std::array<int32_t, 256> next{};
  };
  struct Reading;
  Rest link(Grammar::Part part, Rest tail);
  Grammar::Part repeat(Grammar::Part part, int32_t least, int32_t most);
  void read(Grammar::Part part, Rest rest, Reading& reading);
  int32_t state_of(Reading reading);

  Grammar grammar_;
  std::vector<Link> links_;
  std::map<std::pair<Grammar::Part, Rest>, Rest> link_ids_;
  std::map<std::array<int32_t, 3>, Grammar::Part> repeats_;  // by part, least and most
  std::vector<State> states_;
  std::map<std::pair<Open, bool>, int32_t> state_ids_;
  int32_t start_ = kDead;
  size_t bytes_ = 0;
};

}  // namespace tessera::text
