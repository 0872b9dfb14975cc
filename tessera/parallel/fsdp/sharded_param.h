// One managed parameter of a fully_shard group: the sharded DTensor that users see and how forward reads it.
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

// A slot by owner and position: the owner's list may grow.
struct SlotRef {
  nn::Module* owner;
  size_t index;
  static SlotRef of(const nn::NamedParameter& named) {
    return {named.owner, static_cast<size_t>(named.slot - named.owner->own_parameters().data())};
  }
  nn::ParameterSlot& get() const { return owner->own_parameters()[index]; }
  auto operator<=>(const SlotRef&) const = default;
};

// How a parameter lies over other dims than those of data parallelism, which cuts what lies on a rank then.
struct TensorParallelPart {
  MeshPtr mesh;           // of tensor parallelism
  Placements placements;  // on it, of what forward sees
  bool plain = false;     // forward sees plain tensors that are alike on all ranks of `mesh`
  MeshPtr all;            // the dims of data parallelism, then those of `mesh`
  Placements all_placements;
  std::vector<int64_t> shape;  // of the parameter over all ranks
};

struct ShardedParam {
  std::string name;
  std::vector<SlotRef> slots;  // more than one: tied
  std::vector<int64_t> shape;  // of what data parallelism shards: the parameter, or its tensor-parallel part here
  c10::ScalarType dtype;       // as stored and optimized
  c10::ScalarType gather_dtype;
  at::Tensor parameter;  // the DTensor
  at::Tensor local;      // its local part
  at::Tensor whole;      // the gathered parameter; its storage is empty while resharded
  std::shared_ptr<const TensorParallelPart> tensor_parallel = nullptr;

  int64_t rows() const { return shape[0]; }
  int64_t row_numel() const { return c10::multiply_integers(shape.begin() + 1, shape.end()); }
  int64_t numel_of_all_ranks() const { return c10::multiply_integers(full_shape()); }
  // `part`, shaped like the local part, as a DTensor that lies on `mesh` as the parameter does.
  at::Tensor distributed(const at::Tensor& part, const MeshPtr& mesh) const;
  // The mesh and placements of the parameter that is sharded over `mesh`.
  const MeshPtr& mesh_of(const MeshPtr& mesh) const { return tensor_parallel ? tensor_parallel->all : mesh; }
  Placements placements_on(const DeviceMesh& mesh) const;
  // The size of the parameter over all ranks.
  const std::vector<int64_t>& full_shape() const { return tensor_parallel ? tensor_parallel->shape : shape; }
  // `gathered`, which has `shape`, as forward sees it.
  at::Tensor as_seen(const at::Tensor& gathered) const;
};

// How a parameter of these placements over `tensor_parallel` lies once dim 0 of its parts is sharded over the last dim
// of `data_parallel` and replicated over the one before it. Errors kShape: meshes that are no slices of one mesh, in
// this order, or of another device; placements other than Shard and Replicate.
std::shared_ptr<const TensorParallelPart> tensor_parallel_part(const std::string& name, const MeshPtr& data_parallel,
                                                               const MeshPtr& tensor_parallel,
                                                               const Placements& placements,
                                                               const std::vector<int64_t>& shape, bool plain);

}  // namespace tessera
