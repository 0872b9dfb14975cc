// Applies a plan of styles to a module and the modules below it. Semantics of torch.distributed.tensor.parallel's
// parallelize_module.
//
//   parallelize_module(*layer, mesh->slice({"tp"}),
//                      {{"mlp.up_proj", std::make_shared<ColwiseParallel>()},
//                       {"mlp.down_proj", std::make_shared<RowwiseParallel>()}});
//
// COLLECTIVE over the mesh with src_data_rank, unless the parameters are on the meta device. If ranks are threads of
// one process, each rank must have a module of its own.
#pragma once

#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

struct ParallelizeOptions {
  // The rank of the mesh whose parameter values are used, as in distribute_tensor. None: every rank shards its own
  // copy, without communication.
  std::optional<int> src_data_rank = 0;
  bool warn_unmatched = true;  // logs one line for each pattern that matches no module
};

// Applies the plan and returns the patterns that matched no module. If several patterns match a module, their styles
// are all applied, in the order of the plan. Tied parameters stay tied: the styles of their modules must shard them
// with the same placement.
//
// Errors: kShape for a mesh that is not 1-d; kConfig for a plan of which no pattern matches, for a module that its
// style does not support, and for a module without a style that shares a sharded parameter. If no pattern matches,
// nothing is changed; after another error the module may be partly changed.
std::vector<std::string> parallelize_module(nn::Module& module, const MeshPtr& mesh, const ParallelPlan& plan,
                                            const ParallelizeOptions& options = {});
// Applies one style to the module itself.
void parallelize_module(nn::Module& module, const MeshPtr& mesh, const StylePtr& style,
                        const ParallelizeOptions& options = {});

// The modules at and below `root` that a pattern matches, with their paths.
std::vector<std::pair<std::string, nn::Module*>> match_modules(nn::Module& root, const std::string& pattern);

}  // namespace tessera
