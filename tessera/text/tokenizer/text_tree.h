// Texts as a tree of what they begin with. It takes a byte for each byte of theirs in which they differ from the text
// before them, and 20 for each place where they part.
//
//   const TextTree tree({"red", "green", "grey"});
//   auto place = TextTree::kRoot;
//   for (const char byte : word) if ((place = tree.next(place, byte)) == TextTree::kNowhere) return false;
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

class TextTree {
 public:
  using Place = int32_t;
  static constexpr Place kRoot = -1, kNowhere = std::numeric_limits<Place>::min();

  explicit TextTree(std::vector<std::string_view> texts = {});
  Place next(Place place, uint8_t byte) const;
  bool is_end(Place place) const;   // a text ends here
  bool goes_on(Place place) const;  // a text goes on here
  std::bitset<256> next_bytes(Place place) const;
  // Of texts in UTF-8: one goes on here with a character that is no ASCII, or with the next byte of one that is begun.
  bool goes_on_beyond_ascii(Place place) const;
  bool is_inside_character(Place place) const;

  // In bytes: no tree of these texts takes more.
  static size_t most_bytes(const std::vector<std::string_view>& texts);

 private:
  // Bytes that several texts have in common, behind those of the branch that it is a child of. The children of a
  // branch lie side by side, in the order of their first bytes.
  struct Branch {
    int32_t begin, end;  // in text_
    int32_t first_child, children;
    int32_t is_end;
  };
  Place behind(int32_t branch, int32_t place) const;
  uint8_t largest_byte(Place place) const;  // with which a text goes on here; 0 where none does

  // A place that is not negative is that of the next byte in text_; ~place is a branch that is read to its end.
  std::string text_;
  std::vector<Branch> branches_;  // in the order of `begin`
};

}  // namespace tessera::text
