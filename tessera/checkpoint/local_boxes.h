// The boxes of a tensor that this rank holds. Internal to checkpoint.
//
//   const at::Tensor local = to_local(tensor);
//   for (const LocalTensorBox& box : local_boxes(tensor)) use(box.offset, local_box_view(local, box));
//
// A plain tensor, a replica, and a contiguous shard are one box; a strided shard can be several; a rank without
// elements has no box. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct LocalTensorBox {
  std::vector<int64_t> offset;  // index of the box's first element in the global tensor
  std::vector<int64_t> shape;
  std::vector<int64_t> local_offset;  // index of the box's first element in the local tensor
};
std::vector<LocalTensorBox> local_boxes(const at::Tensor& tensor);
// A view of the box in the local tensor.
at::Tensor local_box_view(const at::Tensor& local, const LocalTensorBox& box);

}  // namespace tessera
