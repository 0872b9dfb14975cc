// Which strings of bytes are wanted: sets of bytes, put together.
//
//   GrammarBuilder build;
//   const auto digit = build.range('0', '9');
//   const auto list = build.forward();                        // may contain itself
//   build.define(list, build.sequence({build.literal("["), build.optional(list), build.literal("]")}));
//   const Grammar grammar = std::move(build).finish(list);
//   GrammarStates states(grammar);                            // grammar_states.h
//
// What is in other grammars regular or context-free is so here; what is ambiguous is followed in all its readings.
// A grammar takes at most kMostBytes of memory, which is looked at before each part is made: a stranger's schema costs
// no more. A Grammar is immutable and cheap to copy: copies share what it holds.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/text/tokenizer/text_tree.h"

namespace tessera::text {

using ByteSet = std::bitset<256>;

class Grammar {
 public:
  using Part = int32_t;  // of the grammar that made it
  static constexpr size_t kMostBytes = size_t{4} << 20;

  size_t bytes() const { return parts_->bytes; }

 private:
  friend class GrammarBuilder;
  friend class GrammarStates;
  enum class Kind : uint8_t { kBytes, kLiteral, kOneOf, kOtherThan, kSequence, kChoice, kRepeat, kForward };
  static constexpr int32_t kEndless = -1;

  // What the numbers of a node say is the matter of its kind.
  struct Node {
    Kind kind;
    int32_t first = 0;   // set, first byte of a literal, tree, row of others, first of the parts, part
    int32_t second = 0;  // bytes of a literal, number of parts, least
    int32_t third = 0;   // most
  };
  // A text that is none of a tree's, up to a byte that ends it.
  struct Other {
    int32_t tree;
    int32_t characters;  // the set of those of one byte
    Part after;          // what may follow once the text can be none of them
    Part wide;           // a character of several bytes, and what may follow
    uint8_t end;
  };
  struct Parts {
    std::vector<Node> nodes{};
    std::vector<ByteSet> sets{};
    std::string text{};         // of literals
    std::vector<Part> lists{};  // of sequences and choices
    std::vector<TextTree> trees{};
    std::vector<Other> others{};
    Part root = 0;
    size_t bytes = 0;
  };
  std::shared_ptr<const Parts> parts_;
};

// Each function that makes a part: Error kConfig where the grammar would take over Grammar::kMostBytes.
class GrammarBuilder {
 public:
  using Part = Grammar::Part;

  Part bytes(const ByteSet& set);
  Part range(int first, int last);      // one byte, both included
  Part literal(std::string_view text);  // "": nothing
  Part one_of(const std::vector<std::string_view>& texts);
  // Characters and the byte behind them, which are together none of the texts: those of one byte are in a set; `wide`
  // is a character of several bytes with what may follow, `after` what may follow where a text can no longer come.
  // Beside a character of several bytes with which a text goes on no other such character may stand: that keeps out
  // more than it must.
  struct OtherThan {
    uint8_t end;
    ByteSet characters;
    Part after, wide;
  };
  Part other_than(const std::vector<std::string_view>& texts, const OtherThan& options);
  Part sequence(const std::vector<Part>& parts);
  Part choice(const std::vector<Part>& parts);
  Part optional(Part part) { return repeat(part, 0, 1); }
  Part many(Part part) { return repeat(part, 0); }  // or none
  Part repeat(Part part, int32_t least, int32_t most = Grammar::kEndless);
  // To be defined later, once. It may contain itself behind a byte, not as its beginning.
  Part forward();
  void define(Part forward, Part as);

  // Parts of which no text comes to an end are left out, so that each byte that may come leads to a whole text. Error
  // kConfig where the root is one.
  Grammar finish(Part root) &&;

 private:
  void charge(size_t bytes);
  Part add(const Grammar::Node& node);
  Part list(Grammar::Kind kind, const std::vector<Part>& parts);
  int32_t set_of(const ByteSet& set);
  int32_t tree_of(const std::vector<std::string_view>& texts);
  std::vector<bool> parts_with_texts() const;

  Grammar::Parts grammar_;
  std::unordered_map<ByteSet, int32_t> sets_;
  std::unordered_map<int32_t, Part> parts_of_sets_;
  Part nothing_ = -1;
};

}  // namespace tessera::text
