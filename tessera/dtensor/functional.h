// Collectives on plain tensors along one mesh dim that return new tensors and are differentiable (twice too). Semantics
// of torch.distributed's functional collectives.
//
//   at::Tensor whole = functional::all_gather(part, {mesh, mesh->dim_of("tp")}, /*dim=*/-1);
//   at::Tensor sum = functional::all_reduce(loss, {mesh});
//
// Each is COLLECTIVE over the mesh dim's group and waits for its result; its backward is COLLECTIVE over the same
// group. Shapes must agree on all ranks of the group but where splits are given. Errors kShape: a DTensor (use
// redistribute), a rank outside the mesh, sizes that do not divide. Gradients exist for sums and averages; asking for
// others is an error in backward.
#pragma once

#include <ATen/core/TensorBase.h>

#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::functional {

struct Along {
  MeshPtr mesh;
  int64_t mesh_dim = 0;
};

at::Tensor all_reduce(const at::Tensor& tensor, const Along& along, comm::ReduceOp op = comm::ReduceOp::kSum);
// The ranks' tensors one after another along `dim`. Backward: reduce_scatter.
at::Tensor all_gather(const at::Tensor& tensor, const Along& along, int64_t dim = 0);
// The r-th part of `dim`, which must divide evenly, of the reduced tensor. Backward: all_gather.
at::Tensor reduce_scatter(const at::Tensor& tensor, const Along& along, int64_t dim = 0,
                          comm::ReduceOp op = comm::ReduceOp::kSum);
// Rows of dim 0: input_splits[r] go to rank r, output_splits[r] come from it. Empty: equal splits. Backward: the way
// back.
at::Tensor all_to_all(const at::Tensor& tensor, const Along& along, const std::vector<int64_t>& output_splits = {},
                      const std::vector<int64_t>& input_splits = {});
// The tensor of the root (a position on the mesh dim). Backward: the sum of the gradients on the root, zeros elsewhere.
at::Tensor broadcast(const at::Tensor& tensor, const Along& along, int root = 0);

}  // namespace tessera::functional
