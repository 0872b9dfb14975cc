// A context-free grammar of byte strings, built from sets of bytes.
//
//   GrammarBuilder build;
//   const auto digit = build.range('0', '9');
//   const auto list = build.forward();                        // may contain itself
//   build.define(list, build.sequence({build.literal("["), build.optional(list), build.literal("]")}));
//   const Grammar grammar = std::move(build).finish(list);
//   GrammarStates states(grammar);                            // grammar_states.h
//
// A grammar may be ambiguous; GrammarStates follows all parses of a text. A grammar uses at most kMostBytes of memory.
// The limit is checked before each part is added, because the schema may come from an untrusted client. A Grammar is
// immutable and cheap to copy: copies share the data.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/text/tokenizer/radix_tree.h"

namespace tessera::text {

using ByteSet = std::bitset<256>;

class Grammar {
 public:
  using PartId = int32_t;  // index of a node; valid only in the grammar that created it
  static constexpr size_t kMostBytes = size_t{4} << 20;

  size_t bytes() const { return parts_->bytes; }

 private:
  friend class GrammarBuilder;
  friend class GrammarStates;
  enum class NodeKind : uint8_t { kBytes, kLiteral, kOneOf, kNoneOf, kSequence, kChoice, kRepeat, kForward };
  static constexpr int32_t kUnbounded = -1;

  // The meaning of the numbers depends on the kind:
  //   kBytes: first is an index into sets.
  //   kLiteral: first is the position of its first byte in text, second its number of bytes.
  //   kOneOf: first is an index into trees.
  //   kNoneOf: first is an index into others.
  //   kSequence, kChoice: first is the index into lists of the first child, second the number of children.
  //   kRepeat: first is the child, second the minimum and third the maximum number of repetitions, or kUnbounded.
  //   kForward: first is the part that define() has set, -1 before.
  struct Node {
    NodeKind kind;
    int32_t first = 0;
    int32_t second = 0;
    int32_t third = 0;
  };
  // The data of a kNoneOf node (GrammarBuilder::none_of_texts).
  struct ExcludedTexts {
    int32_t tree;        // index into trees: the excluded texts
    int32_t characters;  // index into sets: the allowed characters of one byte
    PartId after;        // the part that may follow when the text differs from all excluded texts
    PartId wide;         // a character of several bytes and the part that may follow it
    uint8_t end;         // the byte after the text
  };
  struct GrammarData {
    std::vector<Node> nodes{};
    std::vector<ByteSet> sets{};
    std::string text{};           // the bytes of all literals
    std::vector<PartId> lists{};  // the children of all sequences and choices
    std::vector<RadixTree> trees{};
    std::vector<ExcludedTexts> others{};
    PartId root = 0;
    size_t bytes = 0;
  };
  std::shared_ptr<const GrammarData> parts_;
};

// Builds a grammar from parts. Each function that creates a part raises Error kConfig when the grammar would use more
// than Grammar::kMostBytes.
class GrammarBuilder {
 public:
  using PartId = Grammar::PartId;

  PartId bytes(const ByteSet& set);
  PartId range(int first, int last);      // one byte from `first` to `last`, both included
  PartId literal(std::string_view text);  // "" is the empty text
  PartId one_of(const std::vector<std::string_view>& texts);
  // A text of UTF-8 characters, then the byte `end`; the text must be none of `texts`, the excluded texts. The grammar
  // follows the trie of the excluded texts byte by byte, until a character comes that is not in the trie at this
  // position. If it is a character of one byte, it must be in `characters`, and the part `after` matches all that
  // follows it. If it has several bytes, the part `wide` matches this character and all that follows it. Limitation: at
  // a position where an excluded text continues with a character of several bytes, all other characters of several
  // bytes are excluded, too.
  struct NoneOfOptions {
    uint8_t end;
    ByteSet characters;
    PartId after, wide;
  };
  PartId none_of_texts(const std::vector<std::string_view>& texts, const NoneOfOptions& options);
  PartId sequence(const std::vector<PartId>& parts);
  PartId choice(const std::vector<PartId>& parts);
  PartId optional(PartId part) { return repeat(part, 0, 1); }
  PartId zero_or_more(PartId part) { return repeat(part, 0); }
  PartId repeat(PartId part, int32_t min_count, int32_t max_count = Grammar::kUnbounded);
  // A placeholder for a part that define() sets later, once; with it a part can contain itself. Left recursion is not
  // supported: inside the part, at least one byte must come before the placeholder.
  PartId forward();
  void define(PartId forward, PartId as);

  // Removes the parts that have no finite text, so that a text can be completed after every allowed byte. Error kConfig
  // when the root has no finite text.
  Grammar finish(PartId root) &&;

 private:
  void charge(size_t bytes);  // adds to the memory of the grammar and checks the limit
  PartId add(const Grammar::Node& node);
  PartId list(Grammar::NodeKind kind, const std::vector<PartId>& parts);
  int32_t set_of(const ByteSet& set);
  int32_t tree_of(const std::vector<std::string_view>& texts);
  std::vector<bool> find_productive_parts() const;

  Grammar::GrammarData grammar_;
  std::unordered_map<ByteSet, int32_t> sets_;          // index of each set in grammar_.sets
  std::unordered_map<int32_t, PartId> parts_of_sets_;  // the kBytes part of each set
  PartId empty_part_ = -1;                             // the part of the empty text; -1: not created yet
};

}  // namespace tessera::text
