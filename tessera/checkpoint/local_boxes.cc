#include "tessera/checkpoint/local_boxes.h"

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera {
namespace {

// The index ranges of one dimension that this rank holds.
IndexSpans local_runs(const at::Tensor& tensor, int64_t dim) {
  const int64_t n = tensor.size(dim);
  if (is_dtensor(tensor)) {
    const auto& mesh = *device_mesh(tensor);
    return local_index_spans(n, dim, mesh, shard_splits_of(mesh, placements(tensor)), *mesh.coordinate());
  }
  return n > 0 ? IndexSpans{IndexSpan{0, n}} : IndexSpans{};
}

}  // namespace

// The boxes are the cross product of the ranges of all dimensions. Along each dimension the ranges are stored one after
// another in the local tensor.
std::vector<LocalTensorBox> local_boxes(const at::Tensor& tensor) {
  if (is_dtensor(tensor) && !device_mesh(tensor)->coordinate()) return {};
  std::vector<LocalTensorBox> boxes(1);
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const auto runs = local_runs(tensor, dim);
    std::vector<LocalTensorBox> cut;
    for (const auto& box : boxes) {
      int64_t at = 0;
      for (const auto& run : runs) {
        cut.push_back(box);
        cut.back().offset.push_back(run.start);
        cut.back().shape.push_back(run.size);
        cut.back().local_offset.push_back(at);
        at += run.size;
      }
    }
    boxes = std::move(cut);
  }
  return boxes;
}

at::Tensor local_box_view(const at::Tensor& local, const LocalTensorBox& box) {
  at::Tensor part = local;
  for (size_t d = 0; d < box.local_offset.size(); ++d) {
    part = part.narrow(static_cast<int64_t>(d), box.local_offset[d], box.shape[d]);
  }
  return part;
}

}  // namespace tessera
