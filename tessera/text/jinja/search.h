// Substring search for templates. It charges the budget, and its time is linear in both lengths even for strings that
// are made to be slow to search. All searches of a template use it.
//
//   SubstringSearch search(text, "</think>", budget);
//   for (size_t at = search.find(); at != std::string_view::npos; at = search.find(at + 8)) ...
//
// A SubstringSearch borrows both strings.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "tessera/text/jinja/value.h"

namespace tessera::text::jinja {

class SubstringSearch {
 public:
  // Charges the budget for one pass over the text, i.e. for calls of find() at ascending positions that do not overlap.
  SubstringSearch(std::string_view text, std::string_view needle, Budget& budget);
  // The position of the first `needle` at or after `from`, or npos.
  size_t find(size_t from = 0) const;

 private:
  std::string_view text_, needle_;
};

// The position of the last `needle`, or npos.
size_t find_last(std::string_view text, std::string_view needle, Budget& budget);
// Splits the text at each `needle` and returns the parts in order. At most `limit` splits are made (below 0: all); with
// from_right these are the last ones.
std::vector<std::string_view> split_at(std::string_view text, std::string_view needle, int64_t limit, bool from_right,
                                       Budget& budget);

}  // namespace tessera::text::jinja
