#include "tessera/text/jinja/search.h"

#include <algorithm>
#include <string>

namespace tessera::text::jinja {

SubstringSearch::SubstringSearch(std::string_view text, std::string_view needle, Budget& budget)
    : text_(text), needle_(needle) {
  // The bytes that are charged to the budget stand for the most work that glibc's memmem() may do. If `needle` has at
  // most kCompared bytes, memmem() may compare all of them at each position of the text. For a longer `needle`,
  // memmem() uses an algorithm with linear time.
  constexpr size_t kCompared = 256;
  budget.charge(needle.size() + text.size() * (1 + std::min(needle.size(), kCompared) / 32));
}

size_t SubstringSearch::find(size_t from) const {
  if (from > text_.size()) return std::string_view::npos;
  if (needle_.empty()) return from;
  const void* found = ::memmem(text_.data() + from, text_.size() - from, needle_.data(), needle_.size());
  return found ? static_cast<size_t>(static_cast<const char*>(found) - text_.data()) : std::string_view::npos;
}

// memmem() searches only forwards, so the functions below search the reversed text for the reversed string.
size_t find_last(std::string_view text, std::string_view needle, Budget& budget) {
  const std::string backwards(text.rbegin(), text.rend()), needle_backwards(needle.rbegin(), needle.rend());
  const size_t found = SubstringSearch(backwards, needle_backwards, budget).find();
  return found == std::string_view::npos ? found : text.size() - found - needle.size();
}

std::vector<std::string_view> split_at(std::string_view text, std::string_view needle, int64_t limit, bool from_right,
                                       Budget& budget) {
  std::string backwards, needle_backwards;
  if (from_right) {
    backwards.assign(text.rbegin(), text.rend());
    needle_backwards.assign(needle.rbegin(), needle.rend());
  }
  const SubstringSearch search(from_right ? backwards : text, from_right ? needle_backwards : needle, budget);
  std::vector<std::string_view> pieces;
  const auto add = [&](size_t begin, size_t end) {
    pieces.push_back(text.substr(from_right ? text.size() - end : begin, end - begin));
  };
  size_t begin = 0;
  for (; limit != 0; limit -= limit > 0) {
    const size_t at = search.find(begin);
    if (at == std::string_view::npos) break;
    add(begin, at);
    begin = at + needle.size();
  }
  add(begin, text.size());
  if (from_right) std::ranges::reverse(pieces);
  return pieces;
}

}  // namespace tessera::text::jinja
