#include "tessera/formats/detail/boxes.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tessera::detail {

bool boxes_overlap(c10::IntArrayRef a_offset, c10::IntArrayRef a_shape, c10::IntArrayRef b_offset,
                   c10::IntArrayRef b_shape) {
  for (size_t d = 0; d < a_offset.size(); ++d) {
    if (std::max(a_offset[d], b_offset[d]) >= std::min(a_offset[d] + a_shape[d], b_offset[d] + b_shape[d])) {
      return false;
    }
  }
  return true;
}

bool is_box_inside(c10::IntArrayRef offset, c10::IntArrayRef shape, c10::IntArrayRef whole) {
  if (offset.size() != whole.size() || shape.size() != whole.size()) return false;
  for (size_t d = 0; d < whole.size(); ++d) {
    if (offset[d] < 0 || shape[d] < 0 || shape[d] > whole[d] - offset[d]) return false;
  }
  return true;
}

void copy_intersection(const at::Tensor& from, c10::IntArrayRef at, const at::Tensor& into, c10::IntArrayRef offset) {
  if (!boxes_overlap(at, from.sizes(), offset, into.sizes())) return;
  at::Tensor source = from, target = into;
  for (size_t d = 0; d < offset.size(); ++d) {
    const int64_t begin = std::max(at[d], offset[d]);
    const int64_t size = std::min(at[d] + from.sizes()[d], offset[d] + into.sizes()[d]) - begin;
    source = source.narrow(static_cast<int64_t>(d), begin - at[d], size);
    target = target.narrow(static_cast<int64_t>(d), begin - offset[d], size);
  }
  target.copy_(source);
}

}  // namespace tessera::detail
