// Updates in chunks, so that temporary tensors exist for a few parameters at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::optim::detail {

inline constexpr int64_t kMaxChunkElements = int64_t{1} << 24;

// Calls visit(chunk) for consecutive chunks of `all`. elements_of(entry) is the number of tensor elements of an entry.
// A chunk has at most kMaxChunkElements of them, except that a larger entry is a chunk of its own.
template <class T, class ElementsOf, class Visit>
void for_each_chunk(const std::vector<T>& all, const ElementsOf& elements_of, const Visit& visit) {
  for (size_t begin = 0; begin < all.size();) {
    size_t end = begin + 1;
    int64_t elements = elements_of(all[begin]);
    while (end < all.size() && elements + elements_of(all[end]) <= kMaxChunkElements) {
      elements += elements_of(all[end++]);
    }
    visit(std::vector<T>(all.begin() + static_cast<std::ptrdiff_t>(begin),
                         all.begin() + static_cast<std::ptrdiff_t>(end)));
    begin = end;
  }
}

}  // namespace tessera::optim::detail
