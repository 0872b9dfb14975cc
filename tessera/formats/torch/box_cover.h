// Checks that boxes cover a tensor exactly: each element is in exactly one box. Error messages begin with `where`.
//
//   if (const auto defect = find_cover_defect(size, chunks, where)) report(defect->element, defect->covered_by);
//
// The check takes n log n time for n boxes if the tensor is divided along few dimensions only, as in checkpoints. The
// functions are pure.
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
  std::vector<int64_t> element;  // the first element, in row-major order, that is not in exactly one box
  int64_t covered_by = 0;        // number of boxes that hold the element
};

// Returns the first element that is not in exactly one box; nullopt if the boxes cover the tensor exactly. Boxes must
// be inside a tensor of `size`. Error kFormat when many boxes divide the tensor along more than 5 dimensions, or few
// boxes along more than about 14.
std::optional<CoverDefect> find_cover_defect(std::span<const int64_t> size, std::span<const DcpChunk> boxes,
                                             const std::string& where);

// Whether a box is inside a tensor of this size.
bool is_chunk_inside(const DcpChunk& box, std::span<const int64_t> size);

// Positions of two boxes that share an element, or nullopt. Error kFormat, whose message begins with `where`, when the
// search would take over 2^26 comparisons.
std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const DcpChunk> boxes, const std::string& where);

}  // namespace tessera
