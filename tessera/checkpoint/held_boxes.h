// The boxes of a tensor that this rank holds. Internal to checkpoint.
//
//   const at::Tensor local = to_local(tensor);
//   for (const HeldBox& box : held_boxes(tensor)) use(box.offset, held_part(local, box));
//
// A plain tensor, a replica, and a contiguous shard are one box; a strided shard can be several; no box where the rank
// holds no element. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct HeldBox {
  std::vector<int64_t> offset;  // index of the box's first element in the global tensor
  std::vector<int64_t> shape;
  std::vector<int64_t> at;  // index of the box's first element in the local tensor
};
std::vector<HeldBox> held_boxes(const at::Tensor& tensor);
// A view of the box in the local tensor.
at::Tensor held_part(const at::Tensor& local, const HeldBox& box);

}  // namespace tessera
