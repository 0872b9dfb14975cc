#include "tessera/train/run/run_mesh.h"

#include "tessera/kernels/attention/context_layout.h"

namespace tessera::train {

RunMesh::RunMesh(const RunLayout& layout, const std::string& device, std::shared_ptr<comm::World> world)
    : world_(std::move(world)),
      mesh_(init_device_mesh(world_, device, {layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp},
                             {"pp", "dp_replicate", "dp_shard", "cp", "tp"})) {}

int64_t RunMesh::data_rank() const {
  const int64_t shard = mesh_->dim_of("dp_shard");
  return mesh_->local_rank(mesh_->dim_of("dp_replicate")) * mesh_->size(shard) + mesh_->local_rank(shard);
}

int64_t RunMesh::data_size() const {
  return mesh_->size(mesh_->dim_of("dp_replicate")) * mesh_->size(mesh_->dim_of("dp_shard"));
}

bool RunMesh::shards_weights() const {
  return mesh_->size(mesh_->dim_of("dp_shard")) * mesh_->size(mesh_->dim_of("cp")) > 1;
}

MeshPtr RunMesh::data_parallel() const {
  if (mesh_->size(mesh_->dim_of("dp_replicate")) == 1) return mesh_->slice({"dp_shard"});
  return mesh_->slice({"dp_replicate", "dp_shard"});
}

bool RunMesh::is_counted() const { return mesh_->local_rank(mesh_->dim_of("tp")) == 0; }

data::Batch RunMesh::local_tokens(const data::Batch& rows) const {
  const int64_t dim = mesh_->dim_of("cp");
  if (mesh_->size(dim) == 1) return rows;
  const kernels::ContextLayout layout(rows.tokens.size(1), mesh_->size(dim));
  const auto own = [&](const at::Tensor& tensor) { return layout.shard(tensor, 1, mesh_->local_rank(dim)); };
  return data::make_batch(own(rows.tokens), own(rows.labels), own(rows.positions), own(rows.document_ids));
}

MeshPtr RunMesh::pipeline() const { return mesh_->size(mesh_->dim_of("pp")) == 1 ? nullptr : mesh_->slice({"pp"}); }

// pp is the slowest dim, so the ranks of a stage are one contiguous range of the mesh.
std::vector<int> RunMesh::stage_ranks() const {
  const int64_t stage = mesh_->dim_of("pp"), ranks = mesh_->size() / mesh_->size(stage);
  const auto first = mesh_->ranks().begin() + mesh_->local_rank(stage) * ranks;
  return {first, first + ranks};
}

}  // namespace tessera::train
