#include "tessera/text/tokenizer/radix_tree.h"

#include <algorithm>

namespace tessera::text {

size_t RadixTree::max_tree_bytes(const std::vector<std::string_view>& texts) {
  size_t bytes = sizeof(Branch);
  for (const auto text : texts) bytes += text.size() + 2 * sizeof(Branch);
  return bytes;
}

// Builds the branches in breadth-first order. So the children of a branch are next to each other in branches_, and
// branches_ is sorted by `begin`. The texts are sorted first: then the texts below a branch are a contiguous group, and
// the common prefix of a group is that of its first and its last text.
RadixTree::RadixTree(std::vector<std::string_view> texts) {
  std::ranges::sort(texts);
  texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
  struct Group {
    size_t first, last;  // the range of texts that begin with the prefix of the branch
    size_t depth;        // bytes of this prefix
  };
  branches_.push_back({});
  std::vector<Group> groups = {{0, texts.size(), 0}};  // one per branch
  for (size_t branch = 0; branch < branches_.size(); ++branch) {
    auto [first, last, depth] = groups[branch];
    if (first < last && texts[first].size() == depth) {
      branches_[branch].is_end = 1;
      ++first;
    }
    branches_[branch].first_child = static_cast<int32_t>(branches_.size());
    while (first < last) {
      size_t behind = first + 1;
      while (behind < last && texts[behind][depth] == texts[first][depth]) ++behind;
      const auto one = texts[first], other = texts[behind - 1];
      const auto parts = std::mismatch(one.begin(), one.end(), other.begin(), other.end());
      const auto common = static_cast<size_t>(parts.first - one.begin());
      const auto begin = static_cast<int32_t>(text_.size());
      text_.append(one.substr(depth, common - depth));
      branches_.push_back(
          {.begin = begin, .end = static_cast<int32_t>(text_.size()), .first_child = 0, .children = 0, .is_end = 0});
      groups.push_back({first, behind, common});
      ++branches_[branch].children;
      first = behind;
    }
  }
  text_.shrink_to_fit();
  branches_.shrink_to_fit();
}

// `place` is the position in text_ of a byte of the branch with index `branch`. Returns the Place after this byte: the
// next position, or ~branch (the end of the branch) if this byte is the last one of the branch.
RadixTree::Place RadixTree::behind(int32_t branch, int32_t place) const {
  return place + 1 == branches_[static_cast<size_t>(branch)].end ? ~branch : place + 1;
}

// Returns the Place after `byte`. If `place` is inside a branch (>= 0), only the byte at this position of text_ can
// follow, and a binary search over Branch::begin finds the branch that contains the position. If `place` is the end of
// a branch (< 0), a binary search over the first bytes of the branch's children finds the child that begins with
// `byte`.
RadixTree::Place RadixTree::next(Place place, uint8_t byte) const {
  const auto byte_at = [&](int32_t at) { return static_cast<uint8_t>(text_[static_cast<size_t>(at)]); };
  if (place >= 0) {
    if (byte_at(place) != byte) return kNoNode;
    const auto after = std::upper_bound(branches_.begin() + 1, branches_.end(), place,
                                        [](int32_t at, const Branch& branch) { return at < branch.begin; });
    return behind(static_cast<int32_t>(after - branches_.begin()) - 1, place);
  }
  const auto& branch = branches_[static_cast<size_t>(~place)];
  const auto first = branches_.begin() + branch.first_child, last = first + branch.children;
  const auto child = std::lower_bound(first, last, byte,
                                      [&](const Branch& each, uint8_t value) { return byte_at(each.begin) < value; });
  if (child == last || byte_at(child->begin) != byte) return kNoNode;
  return behind(static_cast<int32_t>(child - branches_.begin()), child->begin);
}

bool RadixTree::is_end(Place place) const { return place < 0 && branches_[static_cast<size_t>(~place)].is_end; }

bool RadixTree::has_continuation(Place place) const {
  return place >= 0 || branches_[static_cast<size_t>(~place)].children > 0;
}

std::bitset<256> RadixTree::next_bytes(Place place) const {
  std::bitset<256> bytes;
  const auto add = [&](int32_t at) { bytes.set(static_cast<uint8_t>(text_[static_cast<size_t>(at)])); };
  if (place >= 0) {
    add(place);
  } else {
    const auto& branch = branches_[static_cast<size_t>(~place)];
    for (int32_t i = 0; i < branch.children; ++i) add(branches_[static_cast<size_t>(branch.first_child + i)].begin);
  }
  return bytes;
}

uint8_t RadixTree::largest_byte(Place place) const {
  auto at = place;
  if (place < 0) {
    const auto& branch = branches_[static_cast<size_t>(~place)];
    if (branch.children == 0) return 0;
    at = branches_[static_cast<size_t>(branch.first_child + branch.children - 1)].begin;
  }
  return static_cast<uint8_t>(text_[static_cast<size_t>(at)]);
}

// Returns whether a byte of a non-ASCII character may come next. In UTF-8 such bytes are 0x80 or larger and all ASCII
// characters are smaller, so it is enough to test the largest byte that may come next.
bool RadixTree::continues_with_non_ascii(Place place) const { return largest_byte(place) >= 0x80; }

// Inside a multi-byte character all bytes that may come next are continuation bytes, 10xxxxxx; elsewhere none of them
// is.
bool RadixTree::is_inside_character(Place place) const { return (largest_byte(place) & 0xC0) == 0x80; }

}  // namespace tessera::text
