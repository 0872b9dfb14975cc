#include "tessera/text/jinja/search.h"

#include <algorithm>
#include <string>

namespace tessera::text::jinja {

Search::Search(std::string_view text, std::string_view wanted, Budget& budget) : text_(text), wanted_(wanted) {
  // The charge is an upper bound of the work of glibc's memmem(): for up to kCompared bytes of `wanted` it may compare
  // all of them at each position; for a longer `wanted` it uses an algorithm with linear time.
  constexpr size_t kCompared = 256;
  budget.charge(wanted.size() + text.size() * (1 + std::min(wanted.size(), kCompared) / 32));
}

size_t Search::find(size_t from) const {
  if (from > text_.size()) return std::string_view::npos;
  if (wanted_.empty()) return from;
  const void* found = ::memmem(text_.data() + from, text_.size() - from, wanted_.data(), wanted_.size());
  return found ? static_cast<size_t>(static_cast<const char*>(found) - text_.data()) : std::string_view::npos;
}

// memmem() searches only forwards, so the functions below search the reversed text for the reversed string.
size_t find_last(std::string_view text, std::string_view wanted, Budget& budget) {
  const std::string backwards(text.rbegin(), text.rend()), wanted_backwards(wanted.rbegin(), wanted.rend());
  const size_t found = Search(backwards, wanted_backwards, budget).find();
  return found == std::string_view::npos ? found : text.size() - found - wanted.size();
}

std::vector<std::string_view> split_at(std::string_view text, std::string_view wanted, int64_t limit, bool from_right,
                                       Budget& budget) {
  std::string backwards, wanted_backwards;
  if (from_right) {
    backwards.assign(text.rbegin(), text.rend());
    wanted_backwards.assign(wanted.rbegin(), wanted.rend());
  }
  const Search search(from_right ? backwards : text, from_right ? wanted_backwards : wanted, budget);
  std::vector<std::string_view> pieces;
  const auto add = [&](size_t begin, size_t end) {
    pieces.push_back(text.substr(from_right ? text.size() - end : begin, end - begin));
  };
  size_t begin = 0;
  for (; limit != 0; limit -= limit > 0) {
    const size_t at = search.find(begin);
    if (at == std::string_view::npos) break;
    add(begin, at);
    begin = at + wanted.size();
  }
  add(begin, text.size());
  if (from_right) std::ranges::reverse(pieces);
  return pieces;
}

}  // namespace tessera::text::jinja
