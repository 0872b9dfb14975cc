// Which boxes of a tensor lie on this rank. Internal to checkpoint.
//
//   for (const HeldBox& box : held_boxes(tensor)) use(box.offset, held_part(local, box));     // local:
//   to_local(tensor)
//
// One box for plain tensors, replicas and shards in one piece; several for strided shards in pieces; none where the
// rank holds nothing. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct HeldBox {
  std::vector<int64_t> offset;  // in the global tensor
  std::vector<int64_t> shape;
  std::vector<int64_t> at;  // where it begins in the local part
};
std::vector<HeldBox> held_boxes(const at::Tensor& tensor);
// The box in the local part; a view.
at::Tensor held_part(const at::Tensor& local, const HeldBox& box);

}  // namespace tessera
