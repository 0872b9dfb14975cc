#include "tessera/text/grammar/grammar.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::text {

void GrammarBuilder::charge(size_t bytes) {
  grammar_.bytes += bytes;
  TESSERA_CHECK(
      grammar_.bytes <= Grammar::kMostBytes, ErrorKind::kConfig,
      "[text.grammar] the grammar takes over {} MiB. Make it smaller: fewer schemas, shorter names and values.",
      Grammar::kMostBytes >> 20);
}

Grammar::Part GrammarBuilder::add(const Grammar::Node& node) {
  charge(sizeof(node));
  grammar_.nodes.push_back(node);
  return static_cast<Part>(grammar_.nodes.size() - 1);
}

// Equal sets are stored once, and bytes() returns the same part for equal sets.
int32_t GrammarBuilder::set_of(const ByteSet& set) {
  const auto [at, fresh] = sets_.try_emplace(set, static_cast<int32_t>(grammar_.sets.size()));
  if (fresh) {
    charge(4 * sizeof(set));  // includes the entries of the builder's own maps
    grammar_.sets.push_back(set);
  }
  return at->second;
}

Grammar::Part GrammarBuilder::bytes(const ByteSet& set) {
  const auto [at, fresh] = parts_of_sets_.try_emplace(set_of(set), 0);
  if (fresh) at->second = add({.kind = Grammar::Kind::kBytes, .first = at->first});
  return at->second;
}

Grammar::Part GrammarBuilder::range(int first, int last) {
  ByteSet set;
  for (int byte = first; byte <= last; ++byte) set.set(static_cast<size_t>(byte));
  return bytes(set);
}

Grammar::Part GrammarBuilder::literal(std::string_view text) {
  if (text.empty()) return sequence({});
  if (text.size() == 1) {
    const int byte = static_cast<unsigned char>(text[0]);
    return range(byte, byte);
  }
  charge(text.size());
  const auto first = static_cast<int32_t>(grammar_.text.size());
  grammar_.text += text;
  return add({.kind = Grammar::Kind::kLiteral, .first = first, .second = static_cast<int32_t>(text.size())});
}

int32_t GrammarBuilder::tree_of(const std::vector<std::string_view>& texts) {
  charge(sizeof(RadixTree) + RadixTree::max_tree_bytes(texts));
  grammar_.trees.emplace_back(texts);
  return static_cast<int32_t>(grammar_.trees.size() - 1);
}

Grammar::Part GrammarBuilder::one_of(const std::vector<std::string_view>& texts) {
  if (texts.empty()) return choice({});
  if (texts.size() == 1) return literal(texts[0]);
  return add({.kind = Grammar::Kind::kOneOf, .first = tree_of(texts)});
}

Grammar::Part GrammarBuilder::other_than(const std::vector<std::string_view>& texts, const OtherThan& options) {
  charge(sizeof(Grammar::Other));
  grammar_.others.push_back({.tree = tree_of(texts),
                             .characters = set_of(options.characters),
                             .after = options.after,
                             .wide = options.wide,
                             .end = options.end});
  return add({.kind = Grammar::Kind::kOtherThan, .first = static_cast<int32_t>(grammar_.others.size() - 1)});
}

// A sequence or a choice of one part is this part itself.
Grammar::Part GrammarBuilder::list(Grammar::Kind kind, const std::vector<Part>& parts) {
  if (parts.size() == 1) return parts[0];
  charge(parts.size() * sizeof(Part));
  const auto first = static_cast<int32_t>(grammar_.lists.size());
  grammar_.lists.insert(grammar_.lists.end(), parts.begin(), parts.end());
  return add({.kind = kind, .first = first, .second = static_cast<int32_t>(parts.size())});
}

Grammar::Part GrammarBuilder::sequence(const std::vector<Part>& parts) {
  if (!parts.empty()) return list(Grammar::Kind::kSequence, parts);
  if (nothing_ < 0) nothing_ = list(Grammar::Kind::kSequence, {});
  return nothing_;
}

Grammar::Part GrammarBuilder::choice(const std::vector<Part>& parts) { return list(Grammar::Kind::kChoice, parts); }

Grammar::Part GrammarBuilder::repeat(Part part, int32_t least, int32_t most) {
  if (most == 0) return sequence({});
  return add({.kind = Grammar::Kind::kRepeat, .first = part, .second = least, .third = most});
}

Grammar::Part GrammarBuilder::forward() { return add({.kind = Grammar::Kind::kForward, .first = -1}); }

void GrammarBuilder::define(Part forward, Part as) {
  auto& node = grammar_.nodes[static_cast<size_t>(forward)];
  TESSERA_CHECK(node.kind == Grammar::Kind::kForward && node.first < 0, ErrorKind::kInternal,
                "[text.grammar] part {} is not a forward part, or is already defined", forward);
  node.first = as;
}

// Finds the parts that have at least one finite text (the productive symbols of the grammar) as a fixpoint: a part is
// productive if the children that it needs are. Except for forward parts, children have smaller indices than their
// parents, so a few passes suffice.
std::vector<bool> GrammarBuilder::parts_with_texts() const {
  using Kind = Grammar::Kind;
  const auto& nodes = grammar_.nodes;
  std::vector<bool> has_text(nodes.size());
  const auto found = [&](Part part) { return part >= 0 && has_text[static_cast<size_t>(part)]; };
  const auto has = [&](const Grammar::Node& node) {
    const auto first = grammar_.lists.begin() + node.first;
    switch (node.kind) {
      case Kind::kBytes:
        return grammar_.sets[static_cast<size_t>(node.first)].any();
      case Kind::kSequence:
        return std::all_of(first, first + node.second, found);
      case Kind::kChoice:
        return std::any_of(first, first + node.second, found);
      case Kind::kRepeat:
        return node.second == 0 || found(node.first);
      case Kind::kForward:
        return found(node.first);
      default:
        return true;
    }
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (has_text[i] || !has(nodes[i])) continue;
      has_text[i] = changed = true;
    }
  }
  return has_text;
}

// A part without a text becomes an empty choice, which matches nothing. A repetition of such a part has a text only if
// its minimum is 0; it becomes the empty text.
Grammar GrammarBuilder::finish(Part root) && {
  const auto has_text = parts_with_texts();
  TESSERA_CHECK(has_text[static_cast<size_t>(root)], ErrorKind::kConfig,
                "[text.grammar] the grammar has no text that ends. Does a schema require itself inside itself?");
  for (size_t i = 0; i < has_text.size(); ++i) {
    auto& node = grammar_.nodes[i];
    if (!has_text[i]) {
      node = {.kind = Grammar::Kind::kChoice};  // a choice without alternatives
    } else if (node.kind == Grammar::Kind::kRepeat && !has_text[static_cast<size_t>(node.first)]) {
      node = {.kind = Grammar::Kind::kSequence};
    }
  }
  grammar_.root = root;
  grammar_.nodes.shrink_to_fit();
  grammar_.sets.shrink_to_fit();
  grammar_.text.shrink_to_fit();
  grammar_.lists.shrink_to_fit();
  grammar_.trees.shrink_to_fit();
  grammar_.others.shrink_to_fit();
  Grammar grammar;
  grammar.parts_ = std::make_shared<const Grammar::Parts>(std::move(grammar_));
  return grammar;
}

}  // namespace tessera::text
