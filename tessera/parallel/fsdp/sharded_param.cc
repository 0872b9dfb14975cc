#include "tessera/parallel/fsdp/sharded_param.h"

#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera {

Placements ShardedParam::placements_on(const DeviceMesh& mesh) const {
  if (tensor_parallel) return tensor_parallel->full_placements;
  return mesh.ndim() == 2 ? Placements{Replicate(), Shard(0)} : Placements{Shard(0)};
}

at::Tensor ShardedParam::as_dtensor(const at::Tensor& part, const MeshPtr& mesh) const {
  // make_dtensor() keeps the device of `part`, which is the CPU for offloaded shards.
  return tessera::make_dtensor(part, mesh_of(mesh), tessera::make_shared_placements(placements_on(*mesh)),
                               full_shape());
}

at::Tensor ShardedParam::forward_tensor(const at::Tensor& gathered) const {
  if (!tensor_parallel || tensor_parallel->plain) return gathered;
  const c10::NoGradGuard no_grad;
  return from_local(gathered, tensor_parallel->mesh, tensor_parallel->placements,
                    FromLocalOptions::contiguous(tensor_parallel->shape));
}

std::shared_ptr<const TensorParallelLayout> make_tensor_parallel_layout(const std::string& name,
                                                                        const MeshPtr& data_parallel,
                                                                        const MeshPtr& tensor_parallel,
                                                                        const Placements& placements,
                                                                        const std::vector<int64_t>& shape, bool plain) {
  TESSERA_CHECK(
      tensor_parallel->device_type() == data_parallel->device_type(), ErrorKind::kShape,
      "[fsdp.shard] {}: Requires DTensor to have mesh of the same type as the FSDP mesh but got {} for DTensor "
      "and {} for FSDP.",
      name, tensor_parallel->to_string(), data_parallel->to_string());
  auto part = std::make_shared<TensorParallelLayout>();
  part->mesh = tensor_parallel;
  part->placements = placements;
  part->plain = plain;
  part->shape = shape;
  part->all = concatenate(data_parallel, tensor_parallel);
  auto names = data_parallel->dim_names();
  names.insert(names.end(), tensor_parallel->dim_names().begin(), tensor_parallel->dim_names().end());
  TESSERA_CHECK(part->all->dim_names() == names, ErrorKind::kShape,
                "[fsdp.shard] {}: found {}, wanted a mesh whose dims of data parallelism come before those of tensor "
                "parallelism, {}.",
                name, part->all->to_string(), tensor_parallel->to_string());
  // If tensor parallelism shards dim 0 as well, the data-parallel shard is a slice of each tensor-parallel shard. In
  // the global tensor its rows are strided, which StridedShard(0, number of tensor-parallel shards) expresses.
  int64_t parts_of_rows = 1;
  for (size_t i = 0; i < placements.size(); ++i) {
    TESSERA_CHECK(
        placements[i].is_shard() || placements[i].is_replicate(), ErrorKind::kShape,
        "[fsdp.shard] {}: found placements {} over {}, wanted Shard or Replicate on every dim. Redistribute it "
        "first.",
        name, to_string(placements), tensor_parallel->to_string());
    if (placements[i].is_shard(0)) parts_of_rows *= tensor_parallel->size(static_cast<int64_t>(i));
  }
  if (data_parallel->ndim() == 2) part->full_placements.push_back(Replicate());
  part->full_placements.push_back(parts_of_rows > 1 ? StridedShard(0, parts_of_rows) : Shard(0));
  for (const auto& placement : placements) part->full_placements.push_back(placement);
  return part;
}

}  // namespace tessera
