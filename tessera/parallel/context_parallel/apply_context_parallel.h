// A model whose rows lie over the ranks of a mesh dim, each of which has some tokens of every row.
//
//   apply_context_parallel(*model, mesh->slice({"cp"}), {.rotate_method = "alltoall"});
//   const kernels::ContextLayout layout(/*tokens=*/T, mesh->size(mesh->dim_of("cp")));
//   at::Tensor loss = model->loss_sum({.tokens = layout.shard(tokens, 1, rank)}, layout.shard(labels, 1, rank));
//
// Only attention is told: everything else works token by token. A rank's loss is the sum over its own labels, and its
// gradients are its tokens' share; both are added up over the group as over ranks of data parallelism, so FSDP shards
// over dp_shard x cp. Call it before fully_shard; with tensor parallelism in any order.
#pragma once

#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

struct ApplyContextParallelOptions {
  std::string rotate_method = "allgather";  // or "alltoall": the ring (nn::RotateMethod)
};

// Every DecoderModel in `model` takes its inputs as the group's rank has them (DecoderModel::set_context_parallelism).
// A mesh of one rank changes nothing. COLLECTIVE over the mesh at its first use. Errors kShape: no mesh, or one of
// several dims; kConfig: another rotate_method, a model without a DecoderModel.
void apply_context_parallel(nn::Module& model, const MeshPtr& mesh, const ApplyContextParallelOptions& options = {});

}  // namespace tessera
