// Collectives on plain tensors along one mesh dim. They return new tensors and are differentiable, also twice. The
// semantics are those of PyTorch's functional collectives.
//
//   at::Tensor whole = functional::all_gather(part, {mesh, mesh->dim_of("tp")}, /*dim=*/-1);
//   at::Tensor sum = functional::all_reduce(loss, {mesh});
//
// Each function is COLLECTIVE over the group of the mesh dim and waits for its result; its backward is COLLECTIVE over
// the same group. Shapes must be equal on all ranks of the group, except where splits are given. Error kShape for a
// DTensor (use redistribute), for a rank outside the mesh and for a size that the number of ranks does not divide. Only
// sums and averages have gradients; the backward of another reduction raises Error kShape.
#pragma once

#include <ATen/core/TensorBase.h>

#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::functional {

struct MeshAxis {
  MeshPtr mesh;
  int64_t mesh_dim = 0;
};

at::Tensor all_reduce(const at::Tensor& tensor, const MeshAxis& axis, comm::ReduceOp op = comm::ReduceOp::kSum);
// Concatenates the ranks' tensors along `dim`. Backward: reduce_scatter.
at::Tensor all_gather(const at::Tensor& tensor, const MeshAxis& axis, int64_t dim = 0);
// Reduces the ranks' tensors and returns on rank r the r-th of the equal slices along `dim`. The size of `dim` must be
// a multiple of the number of ranks. Backward: all_gather.
at::Tensor reduce_scatter(const at::Tensor& tensor, const MeshAxis& axis, int64_t dim = 0,
                          comm::ReduceOp op = comm::ReduceOp::kSum);
// Sends input_splits[r] rows of dim 0 to rank r and receives output_splits[r] rows from rank r. Empty lists mean equal
// splits. Backward: an all_to_all with the two lists exchanged.
at::Tensor all_to_all(const at::Tensor& tensor, const MeshAxis& axis, const std::vector<int64_t>& output_splits = {},
                      const std::vector<int64_t>& input_splits = {});
// Returns the tensor of rank `root`, a coordinate on the mesh dim. Backward: the root gets the sum of the gradients,
// the other ranks get zeros.
at::Tensor broadcast(const at::Tensor& tensor, const MeshAxis& axis, int root = 0);

}  // namespace tessera::functional
