// Makes the gradients of parameters that are replicated over tensor-parallel ranks equal. Semantics of NeMo AutoModel's
// synchronize_tp_replica_gradients.
//
//   loss.backward();
//   optim::synchronize_tp_replica_gradients({&model}, mesh);     // COLLECTIVE over mesh's dim tp
//   optim::scale_grads_and_clip_grad_norm(1.0, {&model}, ...);
//
// For models whose layers mix plain and sharded tensors. Where all tensors are DTensors, their placements already
// define the sums, and the function changes only roundings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::optim {

struct TpReplicaOptions {
  std::string tp_axis_name = "tp";
  // Modules whose gradients are summed, or skipped, as nn::GradientMarks::tp_replicas does for marked modules. The
  // module nearest to a parameter decides.
  std::vector<const nn::Module*> sum = {};
  std::vector<const nn::Module*> skip = {};
  // Largest size of one all-reduce; a larger gradient has a bucket of its own.
  int64_t bucket_bytes = int64_t{256} << 20;
};
// Replaces the gradient of each trainable parameter by its mean over the ranks along tp_axis_name, or by the sum where
// the module is marked kSum. Included are plain parameters, and DTensors that are Replicate on all dims along which
// those ranks differ. Excluded are experts of one rank (GradientMarks::ep_local_experts, is_te_expert_parameter),
// parameters with a divisor of their own, skipped modules, and gradients that are Partial over those ranks. bfloat16
// and float16 are reduced in float32. Call it once per step, because a sum changes when it is summed again.
//
// Does nothing for a null mesh, a mesh without that dim, or a dim of one rank. COLLECTIVE over the dim. Errors kShape,
// the same on all ranks and before any gradient changes: a gradient that some ranks lack or that differs in shape,
// dtype or placements; a sparse gradient; a parameter that two modules share and reduce differently.
void synchronize_tp_replica_gradients(const std::vector<nn::Module*>& model_parts, const MeshPtr& device_mesh,
                                      const TpReplicaOptions& options = {});

}  // namespace tessera::optim
