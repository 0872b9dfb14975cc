// Context parallelism for a model: the tokens of every row are sharded over the ranks of a mesh dim.
//
//   apply_context_parallel(*model, mesh->slice({"cp"}), {.rotate_method = "alltoall"});
//   const kernels::ContextLayout layout(/*tokens=*/T, mesh->size(mesh->dim_of("cp")));
//   at::Tensor loss = model->loss_sum({.tokens = layout.shard(tokens, 1, rank)}, layout.shard(labels, 1, rank));
//
// Only attention communicates; all other operations work token by token. A rank's loss is the sum over its own labels,
// and its gradients come from its own tokens alone. The caller must sum both over the context-parallel ranks, as over
// data-parallel ranks: for the gradients, let FSDP shard over dp_shard x cp. Call this before fully_shard; the order
// with tensor parallelism does not matter.
#pragma once

#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

struct ApplyContextParallelOptions {
  std::string rotate_method = "allgather";  // or "alltoall", the ring (nn::RotateMethod)
};

// Every DecoderModel in `model` then expects inputs with the tokens of this rank
// (DecoderModel::set_context_parallelism). A mesh of one rank changes nothing. COLLECTIVE over the mesh if its process
// group does not exist yet. Errors kShape: no mesh, a mesh of several dims; kConfig: an unknown rotate_method, a model
// without a DecoderModel.
void apply_context_parallel(nn::Module& model, const MeshPtr& mesh, const ApplyContextParallelOptions& options = {});

}  // namespace tessera
