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

Grammar::PartId GrammarBuilder::add(const Grammar::Node& node) {
  charge(sizeof(node));
  grammar_.nodes.push_back(node);
  return static_cast<PartId>(grammar_.nodes.size() - 1);
}

// Returns the index of `set` in grammar_.sets, where equal sets are stored once. bytes() returns the same part for
// equal sets.
int32_t GrammarBuilder::set_of(const ByteSet& set) {
  const auto [at, fresh] = sets_.try_emplace(set, static_cast<int32_t>(grammar_.sets.size()));
  if (fresh) {
    charge(4 * sizeof(set));  // includes the entries of the builder's own maps
    grammar_.sets.push_back(set);
  }
  return at->second;
}

Grammar::PartId GrammarBuilder::bytes(const ByteSet& set) {
  const auto [at, fresh] = parts_of_sets_.try_emplace(set_of(set), 0);
  if (fresh) at->second = add({.kind = Grammar::NodeKind::kBytes, .first = at->first});
  return at->second;
}

Grammar::PartId GrammarBuilder::range(int first, int last) {
  ByteSet set;
  for (int byte = first; byte <= last; ++byte) set.set(static_cast<size_t>(byte));
  return bytes(set);
}

Grammar::PartId GrammarBuilder::literal(std::string_view text) {
  if (text.empty()) return sequence({});
  if (text.size() == 1) {
    const int byte = static_cast<unsigned char>(text[0]);
    return range(byte, byte);
  }
  charge(text.size());
  const auto first = static_cast<int32_t>(grammar_.text.size());
  grammar_.text += text;
  return add({.kind = Grammar::NodeKind::kLiteral, .first = first, .second = static_cast<int32_t>(text.size())});
}

int32_t GrammarBuilder::tree_of(const std::vector<std::string_view>& texts) {
  charge(sizeof(RadixTree) + RadixTree::max_tree_bytes(texts));
  grammar_.trees.emplace_back(texts);
  return static_cast<int32_t>(grammar_.trees.size() - 1);
}

Grammar::PartId GrammarBuilder::one_of(const std::vector<std::string_view>& texts) {
  if (texts.empty()) return choice({});
  if (texts.size() == 1) return literal(texts[0]);
  return add({.kind = Grammar::NodeKind::kOneOf, .first = tree_of(texts)});
}

Grammar::PartId GrammarBuilder::none_of_texts(const std::vector<std::string_view>& texts,
                                              const NoneOfOptions& options) {
  charge(sizeof(Grammar::ExcludedTexts));
  grammar_.others.push_back({.tree = tree_of(texts),
                             .characters = set_of(options.characters),
                             .after = options.after,
                             .wide = options.wide,
                             .end = options.end});
  return add({.kind = Grammar::NodeKind::kNoneOf, .first = static_cast<int32_t>(grammar_.others.size() - 1)});
}

// A sequence or a choice of one part is this part itself.
Grammar::PartId GrammarBuilder::list(Grammar::NodeKind kind, const std::vector<PartId>& parts) {
  if (parts.size() == 1) return parts[0];
  charge(parts.size() * sizeof(PartId));
  const auto first = static_cast<int32_t>(grammar_.lists.size());
  grammar_.lists.insert(grammar_.lists.end(), parts.begin(), parts.end());
  return add({.kind = kind, .first = first, .second = static_cast<int32_t>(parts.size())});
}

Grammar::PartId GrammarBuilder::sequence(const std::vector<PartId>& parts) {
  if (!parts.empty()) return list(Grammar::NodeKind::kSequence, parts);
  if (empty_part_ < 0) empty_part_ = list(Grammar::NodeKind::kSequence, {});
  return empty_part_;
}

Grammar::PartId GrammarBuilder::choice(const std::vector<PartId>& parts) {
  return list(Grammar::NodeKind::kChoice, parts);
}

Grammar::PartId GrammarBuilder::repeat(PartId part, int32_t min_count, int32_t max_count) {
  if (max_count == 0) return sequence({});
  return add({.kind = Grammar::NodeKind::kRepeat, .first = part, .second = min_count, .third = max_count});
}

Grammar::PartId GrammarBuilder::forward() { return add({.kind = Grammar::NodeKind::kForward, .first = -1}); }

void GrammarBuilder::define(PartId forward, PartId as) {
  auto& node = grammar_.nodes[static_cast<size_t>(forward)];
  TESSERA_CHECK(node.kind == Grammar::NodeKind::kForward && node.first < 0, ErrorKind::kInternal,
                "[text.grammar] part {} is not a forward part, or is already defined", forward);
  node.first = as;
}

// Finds the parts that have at least one finite text (the productive symbols of the grammar) as a fixpoint: a part is
// productive if the children that it needs are. Children have smaller indices than their parents, except for the child
// of a kForward part, which define() sets later. So a few passes suffice.
std::vector<bool> GrammarBuilder::find_productive_parts() const {
  using NodeKind = Grammar::NodeKind;
  const auto& nodes = grammar_.nodes;
  std::vector<bool> has_text(nodes.size());
  const auto found = [&](PartId part) { return part >= 0 && has_text[static_cast<size_t>(part)]; };
  const auto has = [&](const Grammar::Node& node) {
    const auto first = grammar_.lists.begin() + node.first;
    switch (node.kind) {
      case NodeKind::kBytes:
        return grammar_.sets[static_cast<size_t>(node.first)].any();
      case NodeKind::kSequence:
        return std::all_of(first, first + node.second, found);
      case NodeKind::kChoice:
        return std::any_of(first, first + node.second, found);
      case NodeKind::kRepeat:
        return node.second == 0 || found(node.first);
      case NodeKind::kForward:
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

// A part that no finite text matches (a schema that requires itself) is replaced by a choice without alternatives,
// which matches nothing. A repetition of such a part that may occur 0 times matches only the empty text, so the
// repetition is replaced by an empty sequence. Error kConfig if no finite text matches the root.
Grammar GrammarBuilder::finish(PartId root) && {
  const auto has_text = find_productive_parts();
  TESSERA_CHECK(has_text[static_cast<size_t>(root)], ErrorKind::kConfig,
                "[text.grammar] the grammar has no text that ends. Does a schema require itself inside itself?");
  for (size_t i = 0; i < has_text.size(); ++i) {
    auto& node = grammar_.nodes[i];
    if (!has_text[i]) {
      node = {.kind = Grammar::NodeKind::kChoice};  // a choice without alternatives
    } else if (node.kind == Grammar::NodeKind::kRepeat && !has_text[static_cast<size_t>(node.first)]) {
      node = {.kind = Grammar::NodeKind::kSequence};
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
  grammar.parts_ = std::make_shared<const Grammar::GrammarData>(std::move(grammar_));
  return grammar;
}

}  // namespace tessera::text
