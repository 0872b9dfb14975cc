// Ranges of a flattened tensor, and the two ways to move what lies in them between ranks. A part of a parameter is
// known in two forms: as a range of elements (FSDP1) and as a box of rows (FSDP2, ShardedTensor, DTensor); rows of dim
// 0 are a range, so one form becomes the other without the whole parameter being anywhere.
//
//   auto have = member_ranges, want = chunk_ranges({5, 3}, 2);         // {[0, 9), [9, 15)}
//   at::Tensor mine = exchange_ranges(*group, piece, have, want, "a.weight.exp_avg");   // rows of this rank, flattened
//
// Arithmetic communicates nothing and is the same on every rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

// Elements [begin, end) of a flattened tensor; empty where they are equal.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const FlatRange&) const = default;
};

// What both have; {0, 0} when that is nothing.
FlatRange intersection(const FlatRange& a, const FlatRange& b);
inline int64_t numel_of(at::IntArrayRef shape) { return c10::multiply_integers(shape); }

// The rows of dim 0 that torch.chunk gives each rank, as ranges of the flattened tensor: ceil(rows / ranks) to each as
// long as there are any. Error kShape for a shape without dims.
std::vector<FlatRange> chunk_ranges(at::IntArrayRef shape, int64_t ranks);
// A box as a range of the flattened tensor, or nullopt where it is not one piece of it. An empty box is {0, 0}.
std::optional<FlatRange> range_of_box(at::IntArrayRef shape, at::IntArrayRef offsets, at::IntArrayRef sizes);
// Where several ranks hold the same elements only the first keeps them: what one would send.
std::vector<FlatRange> first_holders(std::vector<FlatRange> ranges);
// Whether [0, numel) is covered once by the ranges.
bool covers_once(std::vector<FlatRange> ranges, int64_t numel);

// `piece` holds the elements have[rank], 1-d; returns the elements want[rank], 1-d, of the same dtype and device.
// `have` and `want` have one range a rank and are the same on all ranks; those of `have` are disjoint, those of `want`
// may overlap. Moves from rank to rank only what is wanted. COLLECTIVE over the group. Error kShape, on all ranks, when
// a wanted element is nowhere; kShape for a piece of another size.
at::Tensor exchange_ranges(comm::Group& group, const at::Tensor& piece, const std::vector<FlatRange>& have,
                           const std::vector<FlatRange>& want, std::string_view subject);
// All numel elements on every rank, in memory of that size. COLLECTIVE over the group. Errors as above.
at::Tensor gather_ranges(comm::Group& group, const at::Tensor& piece, const std::vector<FlatRange>& have, int64_t numel,
                         std::string_view subject);

}  // namespace tessera
