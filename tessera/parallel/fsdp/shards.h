// The parameters of a group as this rank holds them: DTensors whose local parts lie in one flat buffer, laid out so
// that an all-gather sends it as it is.
//
//   Shards shards(std::move(params), mesh);         // the modules' parameters are DTensors from here on
//   auto input = shards.to_send(plan.layout, *pool);
//
// Belongs to one rank. No communication, but where said.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/parallel/data_parallel/buffer_pool.h"
#include "tessera/parallel/data_parallel/flat_layout.h"
#include "tessera/parallel/fsdp/sharded_param.h"

namespace tessera {

class Shards {
 public:
  // Shards `params` on dim 0 over the last dim of `mesh` (name, slots, shape, dtypes and parameter are set; parameter
  // is the whole tensor, meta included, or a DTensor of tensor parallelism) and shows the shards in the modules.
  // COLLECTIVE over that dim where its group is not made yet.
  // on_host: in memory of the host, from where each send copies them to the mesh's device.
  Shards(std::vector<ShardedParam> params, MeshPtr mesh, bool on_host = false);

  std::vector<ShardedParam>& params() { return params_; }
  const std::vector<ShardedParam>& params() const { return params_; }
  const MeshPtr& mesh() const { return mesh_; }
  comm::Group& group() const { return *mesh_->group(shard_dim_); }  // of the ranks that gather
  int64_t ranks() const { return layout_.ranks; }
  std::vector<size_t> trainable() const;

  bool on_host() const { return on_host_; }
  // Gives shards on the meta device uninitialised memory; their parameters are new tensors. COLLECTIVE as the
  // constructor.
  void materialise();
  // Takes over parameters that somebody replaced (a load with assignment). Error kShape when one does not fit.
  void adopt_replaced();
  bool replaced() const;     // some parameter is another tensor than the one taken over last
  uint64_t version() const;  // grows with every counted write to a shard
  void show() const;         // in the modules' members

  // False once shards were replaced: then each send puts them together first.
  bool lies_flat() const { return flat_; }
  c10::ScalarType wire_dtype() const { return uniform_ ? params_[0].gather_dtype : c10::kByte; }
  // This rank's part of a gather of `layout`, in the gathered dtypes: the shards themselves where they lie so.
  at::Tensor to_send(const FlatLayout& layout, BufferPool& pool) const;
  void write_to(const at::Tensor& part, const FlatLayout& layout) const;

 private:
  void create(c10::Device device, bool copy_values);
  void copy_from_host(const at::Tensor& part, const FlatLayout& layout) const;
  c10::Allocator* sent_memory() const;

  std::vector<ShardedParam> params_;
  MeshPtr mesh_;
  const bool on_host_;
  int64_t shard_dim_;
  FlatLayout layout_;    // stored dtypes
  bool uniform_ = true;  // one stored and one gathered dtype
  bool flat_ = true;
  at::Tensor buffer_;  // bytes; this rank's part
};

}  // namespace tessera
