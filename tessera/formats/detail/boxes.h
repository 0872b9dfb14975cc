// Boxes of a tensor: an offset and a shape, one number for each dimension.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/util/ArrayRef.h>

namespace tessera::detail {

// Whether two boxes of one tensor share an element. Two boxes of a 0-d tensor always share its element.
bool boxes_overlap(c10::IntArrayRef a_offset, c10::IntArrayRef a_shape, c10::IntArrayRef b_offset,
                   c10::IntArrayRef b_shape);
// Whether the box is inside a tensor of shape `whole`. False when the numbers of dimensions differ.
bool is_box_inside(c10::IntArrayRef offset, c10::IntArrayRef shape, c10::IntArrayRef whole);
// Copies the common elements of two boxes of one tensor. `from` holds the box that begins at index `at` of the tensor;
// `into` holds the box that begins at index `offset`. Without common elements nothing is copied.
void copy_intersection(const at::Tensor& from, c10::IntArrayRef at, const at::Tensor& into, c10::IntArrayRef offset);

}  // namespace tessera::detail
