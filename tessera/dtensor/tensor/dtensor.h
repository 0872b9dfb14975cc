// A distributed tensor (DTensor): an at::Tensor with the global shape whose data is stored on the ranks of a
// DeviceMesh, divided as its placements say. Every ATen function, autograd and the optimizers accept it; see
// docs/design/dtensor.md.
//
//   at::Tensor w = distribute_tensor(full, mesh, {Shard(0)});     // COLLECTIVE over the mesh
//   at::Tensor y = at::linear(x, w);                              // communicates where the sharding rule needs it
//   at::Tensor z = full_tensor(y);                                // COLLECTIVE over the mesh
//
// A DTensor is a plain handle (at::Tensor) with the usual reference semantics. A DTensor object belongs to one rank.
// The semantics are those of torch.distributed.tensor unless docs/design/ says otherwise. Errors have the kind kShape.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/context_value.h"
#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace at {
class Tensor;
}

namespace tessera {

bool is_dtensor(const at::TensorBase& tensor) noexcept;
// The mesh and the placements of a DTensor. Error kShape for a plain tensor.
const MeshPtr& device_mesh(const at::TensorBase& tensor);
const Placements& placements(const at::TensorBase& tensor);

struct FromLocalOptions {
  // The global shape and strides. Give both when a dim is sharded unevenly. Without them the global size of a sharded
  // dim is the local size times the mesh size.
  std::optional<std::vector<int64_t>> shape = std::nullopt;
  std::optional<std::vector<int64_t>> stride = std::nullopt;
  // COLLECTIVE over the mesh. Compares dtype, requires_grad and, unless `shape` is given, shape and strides over the
  // ranks; Error kShape for a difference. Then the first rank of each Replicate mesh dim sends its values to the
  // others, whose local tensors are overwritten.
  bool run_check = false;
  // Placements of the gradient of the local tensor. Default: the placements of the tensor, with Replicate for Partial.
  std::optional<Placements> grad_placements = std::nullopt;

  // Options for a contiguous global tensor of this shape.
  static FromLocalOptions contiguous(std::vector<int64_t> shape);
};
// Makes a DTensor from the local tensor of this rank. Communicates only with run_check. Differentiable.
at::Tensor from_local(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                      const FromLocalOptions& options = {});
// The local tensor of this rank. When no gradient is recorded this is the stored tensor itself, else a differentiable
// view. `grad_placements` are the placements of the gradient of the local tensor. Default: the placements of the
// tensor, with Replicate for Partial.
at::Tensor to_local(const at::Tensor& tensor, const std::optional<Placements>& grad_placements = std::nullopt);

// Divides a tensor into shards. `src_data_rank` is the coordinate, on each mesh dim, of the rank whose values are sent
// to the other ranks; the call is then COLLECTIVE over the mesh. With nullopt every rank takes the shard from its own
// copy and nothing is communicated. The tensor must be a leaf of autograd (Error kShape).
at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh, const Placements& placements,
                             std::optional<int> src_data_rank = 0);
struct RedistributeOptions {
  // The function may return while the last collective still runs. The first operation, to_local or str that needs the
  // local tensor waits for the collective. The redistribution of the gradient behaves in the same way.
  bool async_op = false;
  // dtype of the result. The tensor is converted before it is communicated.
  std::optional<c10::ScalarType> forward_dtype = std::nullopt;
  // dtype in which the gradient is communicated. The gradient is then converted back.
  std::optional<c10::ScalarType> backward_dtype = std::nullopt;
};
// COLLECTIVE over the mesh unless the placements are equal. Differentiable, also twice. Error kShape for a new Partial.
// One collective may cover several mesh dims where this moves less data (docs/design/dtensor.md).
at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements,
                        const RedistributeOptions& options = {});
// Whether the local tensor still waits for a collective that async_op started. The function never blocks.
bool is_pending(const at::TensorBase& tensor);
// The whole tensor on every rank. COLLECTIVE over the mesh. Differentiable; `grad_placements` are those of to_local.
at::Tensor full_tensor(const at::Tensor& tensor, const std::optional<Placements>& grad_placements = std::nullopt);

// Size and offset of one rank's shard when a dim of n elements is divided over k ranks as torch.chunk does. An empty
// shard has offset n.
struct LocalRange {
  int64_t size;
  int64_t offset;
};
LocalRange local_range(int64_t n, int64_t k, int64_t coordinate);
// Shape and global offset of this rank's local tensor. A dim without a shard has its global size. A local tensor is one
// box of the global tensor, except that a StridedShard may give several pieces; `offset` is then that of the first
// element.
struct LocalBox {
  std::vector<int64_t> shape;
  std::vector<int64_t> offset;
};
LocalBox local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements);

// While an object of this class exists, plain tensors in operations with DTensors count as replicated. It is in force
// on this thread and in every backward that this thread runs. The caller guarantees equal values on all ranks.
class ImplicitReplication {
 public:
  ImplicitReplication();

 private:
  comm::ContextValue in_force_;
};
bool implicit_replication_enabled() noexcept;

// A text with the global shape, the placements, the mesh and the local values. No communication.
std::string str(const at::Tensor& tensor);
// A table of the index ranges that each rank holds, for a tensor of one or two dims. Rows and columns are index ranges.
// The text is the same on all ranks. No communication. Error kShape for more dims.
std::string visualize_sharding(const at::Tensor& tensor);

}  // namespace tessera
