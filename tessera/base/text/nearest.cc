#include "tessera/base/text/nearest.h"

#include <algorithm>
#include <array>

namespace tessera {

// Dynamic programming over three rows: an edit of prefixes i and j extends one of (i-1, j), (i, j-1), (i-1, j-1), or
// swaps two neighbours after (i-2, j-2).
size_t edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 64;
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  using Row = std::array<size_t, kLongest + 1>;
  Row before_last{}, last{}, row{};
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    before_last = last;
    last = row;
  }
  return last[b.size()];
}

std::string_view nearest(std::string_view word, std::span<const std::string_view> candidates) {
  const auto best = std::ranges::min_element(
      candidates, [&](auto a, auto b) { return edit_distance(word, a) < edit_distance(word, b); });
  return best == candidates.end() ? std::string_view{} : *best;
}

}  // namespace tessera
