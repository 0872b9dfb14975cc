#include "tessera/train/run_mesh.h"

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

MeshPtr RunMesh::data_parallel() const {
  if (mesh_->size(mesh_->dim_of("dp_replicate")) == 1) return mesh_->slice({"dp_shard"});
  return mesh_->slice({"dp_replicate", "dp_shard"});
}

bool RunMesh::counts() const {
  const int64_t stage = mesh_->dim_of("pp");
  return mesh_->local_rank(mesh_->dim_of("tp")) == 0 && mesh_->local_rank(stage) == mesh_->size(stage) - 1;
}

std::vector<int> RunMesh::stage_ranks() const {
  const int64_t stage = mesh_->dim_of("pp"), ranks = mesh_->size() / mesh_->size(stage);
  const auto first = mesh_->ranks().begin() + mesh_->local_rank(stage) * ranks;
  return {first, first + ranks};
}

}  // namespace tessera::train
