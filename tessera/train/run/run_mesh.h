// The device mesh of a run, and the coordinates of this rank in it: which rows the rank reads, which ranks share its
// parameters, and which ranks report.
//
//   RunMesh run_mesh(resolve_layout(recipe, world->size()), "cpu", world);    // with the same layout on all ranks
//   data_parallel(*model, blocks, {.mesh = run_mesh.data_parallel()});
//   auto batch = run_mesh.local_tokens(loader.next_global_slice(global, run_mesh.data_rank() * rows, rows));
//   TrainStep step(*model, *optimizer, run_mesh.world().group(run_mesh.mesh()->device_type()),
//                  {.is_counted = run_mesh.is_counted()});
//
// The mesh of all ranks has the dims (pp, dp_replicate, dp_shard, cp, tp). The last dim varies fastest, so that ranks
// with the most traffic have neighbouring numbers. Expert parallelism has no dim of its own; it divides dp x cp x tp.
// Groups are created, with communication, at their first use. A RunMesh belongs to one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/data/rows/batch.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

class RunMesh {
 public:
  RunMesh(const RunLayout& layout, const std::string& device, std::shared_ptr<comm::World> world);

  comm::World& world() const { return *world_; }
  // All ranks. COLLECTIVE over the world at its first use.
  comm::Group& world_group() const { return *world_->group(); }
  bool is_rank_zero() const { return world_->rank() == 0; }  // rank 0 writes checkpoint manifests, metrics and logs
  const MeshPtr& mesh() const { return mesh_; }

  // Data parallel rank and world size: the global batch is divided into data_size() equal shares, and this rank reads
  // the share data_rank(). All ranks of a pp, cp or tp group read the same share.
  int64_t data_rank() const;
  int64_t data_size() const;
  bool shards_weights() const;  // whether dp_shard x cp has more than one rank
  // The mesh for data parallelism: (dp_shard), or (dp_replicate, dp_shard) if there are replicas.
  MeshPtr data_parallel() const;
  // Whether tokens and losses of this rank are added to the sums over the global batch: true for the first rank of each
  // tp group. In a pipeline, TrainStep adds only those of ranks that also have the last stage.
  bool is_counted() const;
  // The tokens of this rank, out of rows that its whole cp group reads (kernels::ContextLayout); all tokens without cp.
  data::Batch local_tokens(const data::Batch& rows) const;
  // The mesh of the ranks of this rank's pipeline; null without pipeline parallelism.
  MeshPtr pipeline() const;
  // The ranks of this rank's pipeline stage, which hold the same parameters: CheckpointOptions::stage_ranks.
  std::vector<int> stage_ranks() const;

 private:
  std::shared_ptr<comm::World> world_;
  MeshPtr mesh_;
};

}  // namespace tessera::train
