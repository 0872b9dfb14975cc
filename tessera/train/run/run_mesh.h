// Where each rank of a run stands: its coordinates and groups by what they are for.
//
//   RunMesh place(resolve_layout(recipe, world->size()), "cpu", world);       // all ranks alike
//   data_parallel(*model, blocks, {.mesh = place.data_parallel()});
//   auto batch = place.own_tokens(loader.next_global_slice(global, place.data_rank() * rows, rows));
//   TrainStep step(*model, *optimizer, place.world().group(place.mesh()->device_type()), {.counts = place.counts()});
//
// The ranks of the world are the mesh (pp, dp_replicate, dp_shard, cp, tp), the last varying fastest: those that talk
// most are neighbours. Experts take no dim of their own; they divide dp x cp x tp. Nothing is communicated before a
// group is first used. Belongs to one rank.
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
  comm::Group& everyone() const { return *world_->group(); }
  bool chief() const { return world_->rank() == 0; }  // writes what there is one of
  const MeshPtr& mesh() const { return mesh_; }

  // The share of the global batch that this rank reads, of data_size() equal ones: ranks of one pp, cp or tp group read
  // the same.
  int64_t data_rank() const;
  int64_t data_size() const;
  bool shards_weights() const;  // over dp_shard x cp
  // What parameters are sharded and replicated over: (dp_shard), or (dp_replicate, dp_shard) when there are replicas.
  MeshPtr data_parallel() const;
  // Whether this rank's tokens and losses count: those of the global batch are the sums over the ranks that do, one of
  // each tp group, of those with the last stage of a pipeline (which TrainStep knows).
  bool counts() const;
  // Of rows that this rank's cp group reads, the tokens that are its own (kernels::ContextLayout); without cp, all.
  data::Batch own_tokens(const data::Batch& rows) const;
  // Null without: the ranks of this one's pipeline.
  MeshPtr pipeline() const;
  // The ranks of this one's pp stage, which have the same parameters: CheckpointOptions::holders.
  std::vector<int> stage_ranks() const;

 private:
  std::shared_ptr<comm::World> world_;
  MeshPtr mesh_;
};

}  // namespace tessera::train
