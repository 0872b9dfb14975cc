// Whether boxes cover a tensor exactly: no element twice, none left out. `where` is for messages.
//
//   if (const auto defect = find_cover_defect(size, chunks, where)) report(defect->element, defect->covered_by);
//
// Takes n log n time for n boxes that are cut along few dimensions, as checkpoints' are. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/formats/torch/dcp_metadata.h"

namespace tessera {

struct CoverDefect {
  std::vector<int64_t> element;  // the first one, in row-major order, that is not in exactly one box
  int64_t covered_by = 0;        // boxes that hold it
};

// Boxes must lie inside `size`. Error kFormat when there are many that are cut along more than 5 dimensions, or few
// that are cut along more than about 14.
std::optional<CoverDefect> find_cover_defect(std::span<const int64_t> size, std::span<const DcpChunk> boxes,
                                             const std::string& where);

// Whether a box is one of a tensor of that size.
bool lies_inside(const DcpChunk& box, std::span<const int64_t> size);

// Two boxes that share an element, by position. Error kFormat, which begins with `where`, when finding
// none would take over 2^26 comparisons.
std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const DcpChunk> boxes, const std::string& where);

}  // namespace tessera
