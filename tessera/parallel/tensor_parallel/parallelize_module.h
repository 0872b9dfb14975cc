// Applies a plan of styles to a module and those below it. Semantics of torch.distributed.tensor.parallel's
// parallelize_module.
//
//   parallelize_module(*layer, mesh->slice({"tp"}),
//                      {{"mlp.up_proj", std::make_shared<ColwiseParallel>()},
//                       {"mlp.down_proj", std::make_shared<RowwiseParallel>()}});
//
// COLLECTIVE over the mesh with src_data_rank where parameters have values. A module belongs to one rank.
#pragma once

#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

struct ParallelizeOptions {
  // Whose values of a parameter count, as for distribute_tensor; none: every rank cuts its own copy, no communication.
  std::optional<int> src_data_rank = 0;
  bool warn_unmatched = true;  // one line a pattern that no module has
};

// The patterns that matched no module. Tied parameters stay tied: their modules need styles that shard them alike.
// Where several patterns match a module, all are applied in order. Errors: kShape for a mesh of other than one dim;
// kConfig for a plan of which no pattern matches, for a module that its style cannot take, and for one that would be
// left with a sharded parameter but no style. Nothing is changed where no pattern matches.
std::vector<std::string> parallelize_module(nn::Module& module, const MeshPtr& mesh, const ParallelPlan& plan,
                                            const ParallelizeOptions& options = {});
// The style on the module itself.
void parallelize_module(nn::Module& module, const MeshPtr& mesh, const StylePtr& style,
                        const ParallelizeOptions& options = {});

// The modules at and below `root` that a pattern means, with their paths.
std::vector<std::pair<std::string, nn::Module*>> match_modules(nn::Module& root, const std::string& pattern);

}  // namespace tessera
