// Looking for one string in another, the only way in which templates may: paid for, and linear in both lengths also
// where they are built to make a search slow.
//
//   Search search(text, "</think>", budget);
//   for (size_t at = search.find(); at != std::string_view::npos; at = search.find(at + 8)) ...
//
// Borrows both strings.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "tessera/text/jinja/value.h"

namespace tessera::text::jinja {

class Search {
 public:
  // Pays for finds at rising positions that do not overlap.
  Search(std::string_view text, std::string_view wanted, Budget& budget);
  // The first place at or behind `from`, npos when there is none.
  size_t find(size_t from = 0) const;

 private:
  std::string_view text_, wanted_;
};

// The last place, npos when there is none.
size_t find_last(std::string_view text, std::string_view wanted, Budget& budget);
// What stands between the places of `wanted`, in order; at most `limit` cuts (below 0: all), the last ones when
// from_right.
std::vector<std::string_view> split_at(std::string_view text, std::string_view wanted, int64_t limit, bool from_right,
                                       Budget& budget);

}  // namespace tessera::text::jinja
