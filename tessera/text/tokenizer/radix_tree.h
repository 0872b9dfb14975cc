// A radix tree (compressed trie) of a set of texts. Memory: one byte for each byte that a text does not share with the
// text before it in sorted order, and 20 bytes for each branch.
//
//   const RadixTree tree({"red", "green", "grey"});
//   auto place = RadixTree::kRoot;
//   for (const char byte : word) if ((place = tree.next(place, byte)) == RadixTree::kNoNode) return false;
//   return tree.is_end(place);
//
// Immutable.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::text {

class RadixTree {
 public:
  // A place identifies a prefix of one or more of the texts.
  using Place = int32_t;
  static constexpr Place kRoot = -1, kNoNode = std::numeric_limits<Place>::min();

  explicit RadixTree(std::vector<std::string_view> texts = {});
  Place next(Place place, uint8_t byte) const;  // the prefix and `byte`; kNoNode when no text begins with it
  bool is_end(Place place) const;               // the prefix is a whole text
  bool has_continuation(Place place) const;     // a text is longer than the prefix
  std::bitset<256> next_bytes(Place place) const;
  // For texts in UTF-8: whether some text continues the prefix with a byte of a non-ASCII character.
  bool continues_with_non_ascii(Place place) const;
  // For texts in UTF-8: whether the prefix that `place` identifies ends inside a multi-byte character.
  bool is_inside_character(Place place) const;

  // An upper bound of the tree's memory, in bytes.
  static size_t max_tree_bytes(const std::vector<std::string_view>& texts);

 private:
  // A branch has the bytes that a group of texts has in common after the bytes of the parent branch. The children of a
  // branch are next to each other in branches_, sorted by their first byte.
  struct Branch {
    int32_t begin, end;  // byte range in text_
    int32_t first_child, children;
    int32_t is_end;  // 1: a text ends after the last byte
  };
  Place behind(int32_t branch, int32_t place) const;
  uint8_t largest_byte(Place place) const;  // the largest byte that continues the prefix; 0 when none does

  // If a place is >= 0, its prefix ends inside a branch, and the place is the position in text_ of the byte that
  // follows the prefix. If a place is < 0, its prefix ends at the end of branch ~place.
  std::string text_;
  std::vector<Branch> branches_;  // sorted by `begin`; the first one is the root
};

}  // namespace tessera::text
