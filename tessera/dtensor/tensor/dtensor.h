// A distributed tensor: an at::Tensor of the global shape whose data lies on the ranks of a DeviceMesh as its
// placements say. Every ATen function, autograd and optimizers work on it; see docs/design/dtensor.md.
//
//   at::Tensor w = distribute_tensor(full, mesh, {Shard(0)});     // COLLECTIVE over the mesh
//   at::Tensor y = at::linear(x, w);                              // communicates where it must
//   at::Tensor z = full_tensor(y);                                // COLLECTIVE over the mesh
//
// A DTensor is a plain handle (at::Tensor) with the usual reference semantics. It belongs to one rank.
// Semantics of torch.distributed.tensor unless docs/design/ says otherwise. Errors are kShape.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/propagated.h"
#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace at {
class Tensor;
}

namespace tessera {

bool is_dtensor(const at::TensorBase& tensor) noexcept;
// Of a DTensor; Error kShape for a plain tensor.
const MeshPtr& device_mesh(const at::TensorBase& tensor);
const Placements& placements(const at::TensorBase& tensor);

struct FromLocalOptions {
  // The global shape and strides where they are not local x mesh size (uneven shards): both or neither.
  std::optional<std::vector<int64_t>> shape = std::nullopt;
  std::optional<std::vector<int64_t>> stride = std::nullopt;
  bool run_check = false;  // COLLECTIVE over the mesh: compare shapes, dtypes, broadcast replicas
  // How the gradient of the local tensor lies; default: as the tensor, Partial as Replicate.
  std::optional<Placements> grad_placements = std::nullopt;

  // Of a whole of this shape that is contiguous.
  static FromLocalOptions contiguous(std::vector<int64_t> shape);
};
// Wraps this rank's part. No communication unless run_check. Differentiable.
at::Tensor from_local(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                      const FromLocalOptions& options = {});
// This rank's part. Without grad mode the very tensor inside; with it a differentiable view. grad_placements says how
// the gradient of the local part lies (default: as the tensor, Partial as Replicate).
at::Tensor to_local(const at::Tensor& tensor, const std::optional<Placements>& grad_placements = std::nullopt);

// Cuts a tensor into shards. src_data_rank: position, on each mesh dim, of the rank whose data counts (COLLECTIVE over
// the mesh); nullopt: every rank cuts its own copy, no communication.
at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh, const Placements& placements,
                             std::optional<int> src_data_rank = 0);
struct RedistributeOptions {
  // The last collective may still be under way on return; the wait comes when the local part is first needed: by an
  // operation, to_local, str. The gradient's redistribution likewise.
  bool async_op = false;
  std::optional<c10::ScalarType> forward_dtype = std::nullopt;   // convert to it first; the result has it
  std::optional<c10::ScalarType> backward_dtype = std::nullopt;  // the gradient travels in it and is converted back
};
// COLLECTIVE over the mesh unless the placements agree. Differentiable, twice too. To Partial: Error kShape. Moves no
// more than it must: several mesh dims at once where that is cheaper (docs/design/dtensor.md).
at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements,
                        const RedistributeOptions& options = {});
// Whether the local part is still being made by an async_op. Never blocks.
bool is_pending(const at::TensorBase& tensor);
// The whole tensor on every rank. COLLECTIVE over the mesh. Differentiable; grad_placements as for to_local.
at::Tensor full_tensor(const at::Tensor& tensor, const std::optional<Placements>& grad_placements = std::nullopt);

// Size and offset of one rank's shard of a dim of n elements over k ranks (torch.chunk's rule; an empty shard has
// offset n).
struct LocalRange {
  int64_t size;
  int64_t offset;
};
LocalRange local_range(int64_t n, int64_t k, int64_t coordinate);
// Shape and global offset of this rank's part. Partial and Replicate dims are whole. The part is a box of the whole
// unless a StridedShard gives it several pieces; the offset is then that of its first element.
struct LocalBox {
  std::vector<int64_t> shape;
  std::vector<int64_t> offset;
};
LocalBox local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements);

// While one lives, plain tensors beside DTensors count as replicated on this thread, and in a backward that it runs:
// the caller vouches that they are alike on all ranks.
class ImplicitReplication {
 public:
  ImplicitReplication();

 private:
  comm::Propagated in_force_;
};
bool implicit_replication_enabled() noexcept;

// Text with global shape, placements, mesh and local values; no communication.
std::string str(const at::Tensor& tensor);
// A picture of which ranks hold what of a tensor of one or two dims: a table whose rows and columns are index ranges;
// alike on all ranks; no communication. Error kShape for more dims.
std::string visualize_sharding(const at::Tensor& tensor);

}  // namespace tessera
