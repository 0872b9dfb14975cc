// Boxes of a tensor, each an offset and a shape: stored ones, wanted ones, and what they share.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/util/ArrayRef.h>

namespace tessera::detail {

// Whether they share an element. Without dims they do.
bool boxes_meet(c10::IntArrayRef a_offset, c10::IntArrayRef a_shape, c10::IntArrayRef b_offset,
                c10::IntArrayRef b_shape);
// Whether a box of this shape at this offset is one of a tensor of that shape.
bool box_lies_inside(c10::IntArrayRef offset, c10::IntArrayRef shape, c10::IntArrayRef whole);
// Copies what `from`, which lies at `at` in the whole, shares with the box of into's shape at `offset`.
void copy_common_part(const at::Tensor& from, c10::IntArrayRef at, const at::Tensor& into, c10::IntArrayRef offset);

}  // namespace tessera::detail
