// The parameters of a group on this rank: DTensors whose local shards are stored in one flat buffer. The buffer has the
// layout of an all-gather's input, so it can be sent without a copy.
//
//   FlatShards shards(std::move(params), mesh);         // the modules' parameters are DTensors from here on
//   auto input = shards.all_gather_input(plan.layout, *pool);
//
// Belongs to one rank. No communication, except where noted.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/parallel/data_parallel/buffer_pool.h"
#include "tessera/parallel/data_parallel/flat_layout.h"
#include "tessera/parallel/fsdp/sharded_param.h"

namespace tessera {

class FlatShards {
 public:
  // Shards `params` on dim 0 over the last dim of `mesh`, and sets the modules' members to the shards. name, slots,
  // shape, dtypes and parameter must be set; parameter is the unsharded tensor, possibly on the meta device, or a
  // DTensor of tensor parallelism. on_host: keeps the shards in host memory; each gather copies them to the mesh's
  // device first. COLLECTIVE over the last dim if its process group does not exist yet. Error kShape when only some
  // parameters are on the meta device.
  FlatShards(std::vector<ShardedParam> params, MeshPtr mesh, bool on_host = false);

  std::vector<ShardedParam>& params() { return params_; }
  const std::vector<ShardedParam>& params() const { return params_; }
  const MeshPtr& mesh() const { return mesh_; }
  comm::Group& group() const { return *mesh_->group(shard_dim_); }  // the ranks of the gather
  int64_t ranks() const { return layout_.ranks; }
  // Indices in params() of the parameters that require gradients. Error kShape when the stored dtypes of these
  // parameters differ.
  std::vector<size_t> trainable() const;

  bool on_host() const { return on_host_; }
  // Allocates shards that are on the meta device, without initialising them; their parameters become new tensors.
  // COLLECTIVE as the constructor.
  void allocate_meta_shards();
  // Takes over parameters that were replaced in the modules (by a load with assignment) as the new shards. Error kShape
  // when the mesh, placements, shape or dtype of a replacement differ.
  void adopt_replaced();
  bool replaced() const;            // some slot holds another tensor than the last adopted parameter
  uint64_t version() const;         // grows with every versioned write to a shard
  void use_sharded_params() const;  // sets the modules' members to the shards

  // Whether the shards of all parameters are in the flat buffer that this object allocated for them. False after
  // adopt_replaced() took over a replaced parameter, whose shard has its own memory: each gather then first copies all
  // shards into one buffer.
  bool is_in_flat_buffer() const { return flat_; }
  // The dtype of the gathered buffer; kByte if the parameters' dtypes differ.
  c10::ScalarType wire_dtype() const { return uniform_ ? params_[0].gather_dtype : c10::kByte; }
  // Returns this rank's input of an all-gather with `layout`. The shard of each parameter is converted to the
  // parameter's gather_dtype. The result shares the memory of the flat buffer of the shards if no cast or copy is
  // needed.
  at::Tensor all_gather_input(const FlatLayout& layout, BufferPool& pool) const;
  // Copies the shards to `part`, at the offsets of `layout` and converted to the gathered dtypes.
  void copy_to(const at::Tensor& part, const FlatLayout& layout) const;

 private:
  void create(c10::Device device, bool copy_values);
  void copy_from_host(const at::Tensor& part, const FlatLayout& layout) const;
  c10::Allocator* comm_allocator() const;

  std::vector<ShardedParam> params_;
  MeshPtr mesh_;
  const bool on_host_;
  int64_t shard_dim_;
  FlatLayout layout_;    // in the stored dtypes
  bool uniform_ = true;  // all parameters have one stored dtype and one gathered dtype
  bool flat_ = true;
  at::Tensor buffer_;  // the flat buffer, bytes
};

}  // namespace tessera
