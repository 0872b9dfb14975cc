// Ranges of a flattened tensor, and two functions that move the elements of ranges between ranks. A shard of a
// parameter has one of two forms: a range of elements (FSDP1), or a box of rows (FSDP2, ShardedTensor, DTensor). Rows
// of dim 0 are a range of elements. Therefore one form can be converted to the other without gathering the whole
// parameter.
//
//   auto have = member_ranges, want = chunk_ranges({5, 3}, 2);         // {[0, 9), [9, 15)}
//   at::Tensor mine = all_to_all_ranges(*group, piece, have, want, "a.weight.exp_avg");   // rows of this rank, as 1-d
//
// The functions on ranges alone do not communicate and give the same result on every rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

// The elements [begin, end) of a flattened tensor; empty when begin == end.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const FlatRange&) const = default;
};

// Returns the common elements of two ranges, or {0, 0} when there are none.
FlatRange intersection(const FlatRange& a, const FlatRange& b);
inline int64_t numel_of(at::IntArrayRef shape) { return c10::multiply_integers(shape); }

// Returns the rows of dim 0 that torch.chunk gives each rank, as ranges of the flattened tensor: ceil(rows / ranks)
// rows per rank, and fewer or none for the last ranks. Error kShape for a shape without dims.
std::vector<FlatRange> chunk_ranges(at::IntArrayRef shape, int64_t ranks);
// Returns a box as a range of the flattened tensor, or nullopt when its elements are not contiguous there. An empty box
// is {0, 0}.
std::optional<FlatRange> range_of_box(at::IntArrayRef shape, at::IntArrayRef offsets, at::IntArrayRef sizes);
// `ranges` has one range per rank. Empties the range of each rank for which an earlier rank has an equal range, so that
// equal ranges are sent once, by the first rank that has them.
std::vector<FlatRange> keep_first_holders(std::vector<FlatRange> ranges);
// Returns whether the ranges cover each element of [0, numel) exactly once.
bool covers_once(std::vector<FlatRange> ranges, int64_t numel);

// Redistributes the elements of a flattened tensor. `piece` is 1-d and holds the elements have[rank]; the result is 1-d
// and holds the elements want[rank], in the same dtype and on the same device. `have` and `want` have one range per
// rank and are the same on all ranks. Ranges of `have` are disjoint; ranges of `want` may overlap. Each element is sent
// only to ranks that want it. COLLECTIVE over the group. Error kShape, on all ranks, when a rank wants an element that
// no rank has; error kShape for a piece of another size.
at::Tensor all_to_all_ranges(comm::Group& group, const at::Tensor& piece, const std::vector<FlatRange>& have,
                             const std::vector<FlatRange>& want, std::string_view subject);
// Returns all `numel` elements of the flattened tensor on every rank. `piece` and `have` are those of
// all_to_all_ranges. The result is the only buffer of `numel` elements that a rank allocates. COLLECTIVE over the
// group. Errors as all_to_all_ranges.
at::Tensor all_gather_ranges(comm::Group& group, const at::Tensor& piece, const std::vector<FlatRange>& have,
                             int64_t numel, std::string_view subject);

}  // namespace tessera
