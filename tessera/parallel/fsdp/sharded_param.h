// One managed parameter of a fully_shard group: the sharded DTensor that users see, and the tensor that forward reads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

// Identifies a parameter slot by its module and index. A pointer would not stay valid, because the module's list of
// slots may grow.
struct SlotRef {
  nn::Module* owner;
  size_t index;
  static SlotRef of(const nn::NamedParameter& named) {
    return {named.owner, static_cast<size_t>(named.slot - named.owner->own_parameters().data())};
  }
  nn::ParameterSlot& get() const { return owner->own_parameters()[index]; }
  auto operator<=>(const SlotRef&) const = default;
};

// The placements of a parameter over the tensor-parallel mesh. fully_shard shards the local tensor of this parameter.
struct TensorParallelLayout {
  MeshPtr mesh;                // the tensor-parallel mesh
  Placements placements;       // on `mesh`, of the tensor that forward reads
  bool plain = false;          // forward reads plain tensors with equal values on all ranks of `mesh`
  MeshPtr all;                 // the dims of data parallelism, then those of `mesh`
  Placements full_placements;  // on `all`, of the sharded parameter
  std::vector<int64_t> shape;  // global shape
};

struct ShardedParam {
  std::string name;
  std::vector<SlotRef> slots;    // all slots that share the parameter; more than one: tied
  std::vector<int64_t> shape;    // before sharding: of the parameter, or of its tensor-parallel local tensor
  c10::ScalarType dtype;         // of the stored and optimized shard
  c10::ScalarType gather_dtype;  // of the gathered parameter
  at::Tensor parameter;          // the sharded DTensor
  at::Tensor local;              // its local shard
  at::Tensor whole;              // the unsharded parameter; its storage is empty while resharded
  std::shared_ptr<const TensorParallelLayout> tensor_parallel = nullptr;

  int64_t rows() const { return shape[0]; }
  int64_t row_numel() const { return c10::multiply_integers(shape.begin() + 1, shape.end()); }
  int64_t numel_of_all_ranks() const { return c10::multiply_integers(full_shape()); }
  // Wraps `part`, which has the shape of the local shard, as a DTensor with the parameter's mesh and placements.
  at::Tensor as_dtensor(const at::Tensor& part, const MeshPtr& mesh) const;
  // The mesh and placements of the parameter after sharding over `mesh`.
  const MeshPtr& mesh_of(const MeshPtr& mesh) const { return tensor_parallel ? tensor_parallel->all : mesh; }
  Placements placements_on(const DeviceMesh& mesh) const;
  // The global shape of the parameter.
  const std::vector<int64_t>& full_shape() const { return tensor_parallel ? tensor_parallel->shape : shape; }
  // Makes the tensor that forward reads from `gathered`, the gathered tensor of shape `shape`. For a tensor-parallel
  // parameter it is a DTensor.
  at::Tensor forward_tensor(const at::Tensor& gathered) const;
};

// The placements of a tensor-parallel parameter after dim 0 of its local tensor is sharded over the last dim of
// `data_parallel`, and replicated over the dim before it, if `data_parallel` is 2-d. Errors kShape: meshes that are not
// slices of one mesh in this order, or of different device types; placements other than Shard and Replicate.
std::shared_ptr<const TensorParallelLayout> make_tensor_parallel_layout(const std::string& name,
                                                                        const MeshPtr& data_parallel,
                                                                        const MeshPtr& tensor_parallel,
                                                                        const Placements& placements,
                                                                        const std::vector<int64_t>& shape, bool plain);

}  // namespace tessera
