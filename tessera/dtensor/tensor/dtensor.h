// A distributed tensor (DTensor): an at::Tensor with the global shape whose data is stored on the ranks of a
// DeviceMesh, divided as its placements say. Every ATen function, autograd and the optimizers accept it; see
// docs/design/dtensor.md.
//
//   at::Tensor w = distribute_tensor(full, mesh, {Shard(0)});     // COLLECTIVE over the mesh
//   at::Tensor y = at::linear(x, w);                              // communicates where the sharding rule needs it
//   at::Tensor z = full_tensor(y);                                // COLLECTIVE over the mesh
//
// A DTensor is an at::Tensor with its usual reference semantics. Each rank has its own DTensor object with its local
// tensor. The semantics are those of torch.distributed.tensor unless docs/design/ says otherwise. Errors have the kind
// kShape.
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
  // dim is the local size times the sizes of the mesh dims that shard it.
  std::optional<std::vector<int64_t>> shape = std::nullopt;
  std::optional<std::vector<int64_t>> stride = std::nullopt;
  // COLLECTIVE over the mesh. Compares the ranks' dtype, requires_grad and, unless `shape` is given, local shape and
  // strides; Error kShape on all ranks if they differ. Then along each Replicate mesh dim the first rank broadcasts its
  // values, which overwrite the local tensors of the others.
  bool run_check = false;
  // Placements of the gradient of the local tensor. Default: the placements of the tensor, with Replicate for Partial.
  std::optional<Placements> grad_placements = std::nullopt;

  // Options for a contiguous global tensor of this shape.
  static FromLocalOptions contiguous(std::vector<int64_t> shape);
};
// Makes a DTensor from the local tensor of this rank. Communicates only with run_check. Differentiable.
at::Tensor from_local(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                      const FromLocalOptions& options = {});
// Returns the local tensor of this rank: the stored tensor itself if autograd does not record the call, else a
// differentiable alias of it. `grad_placements` are the placements of the gradient of the local tensor. Default: the
// placements of the tensor, with Replicate for Partial.
at::Tensor to_local(const at::Tensor& tensor, const std::optional<Placements>& grad_placements = std::nullopt);

// Makes a DTensor from a tensor with all elements. The values come from the rank whose coordinate on every mesh dim is
// `src_data_rank`, by scatter and broadcast; the call is then COLLECTIVE over the mesh. With nullopt every rank slices
// its shard from its own `tensor` and nothing is communicated. The tensor must be an autograd leaf (Error kShape).
at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh, const Placements& placements,
                             std::optional<int> src_data_rank = 0);
struct RedistributeOptions {
  // true: redistribute may return while the last collective is still running. The first use of the local tensor (an
  // operation, to_local or str) waits for the collective. The backward redistributes the gradient in the same way.
  bool async_op = false;
  // dtype of the result. The tensor is converted to it before it is communicated.
  std::optional<c10::ScalarType> forward_dtype = std::nullopt;
  // dtype in which the backward communicates the gradient. The gradient is then converted to the dtype of the tensor.
  std::optional<c10::ScalarType> backward_dtype = std::nullopt;
};
// Returns the tensor with other placements. COLLECTIVE over the mesh unless the placements are equal. Differentiable,
// also twice. Error kShape if a mesh dim would become Partial. One collective may run over several mesh dims if this is
// cheaper (docs/design/dtensor.md).
at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements,
                        const RedistributeOptions& options = {});
// Whether `tensor` is the result of redistribute with async_op and its local tensor has not been used yet, so that the
// first use may wait for the collective. The function never blocks.
bool is_pending(const at::TensorBase& tensor);
// Returns all elements of the tensor on every rank, as a plain tensor. COLLECTIVE over the mesh. Differentiable;
// `grad_placements` are those of to_local.
at::Tensor full_tensor(const at::Tensor& tensor, const std::optional<Placements>& grad_placements = std::nullopt);

// Size and offset of one rank's shard when a dim of n elements is divided over k ranks as torch.chunk does. An empty
// shard has offset n.
struct LocalRange {
  int64_t size;
  int64_t offset;
};
LocalRange local_range(int64_t n, int64_t k, int64_t coordinate);
// Shape of this rank's local tensor, and the global index of its first element. A dim that is not sharded has its
// global size. A local tensor is one box of the global tensor, except that a StridedShard may consist of several
// pieces.
struct LocalBox {
  std::vector<int64_t> shape;
  std::vector<int64_t> offset;
};
LocalBox local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements);

// While an object of this class exists, plain tensors that are passed to operations together with DTensors count as
// replicated. The object applies to its thread and to every backward that this thread runs. The caller guarantees that
// such plain tensors have equal values on all ranks. This is PyTorch's implicit_replication.
class ImplicitReplication {
 public:
  ImplicitReplication();

 private:
  comm::ContextValue in_force_;
};
bool implicit_replication_enabled() noexcept;

// Returns a text with the global shape, the placements, the mesh and the values of this rank's local tensor. No
// communication.
std::string str(const at::Tensor& tensor);
// Returns a table that shows which ranks hold which elements of a tensor of one or two dims. Rows and columns of the
// table are ranges of global indices; a cell lists ranks. The text is the same on all ranks. No communication. Error
// kShape for 0 dims or more than 2.
std::string visualize_sharding(const at::Tensor& tensor);

}  // namespace tessera
