// Makes the gradients of replicated parameters equal on all tensor-parallel ranks. Semantics of NeMo AutoModel's
// synchronize_tp_replica_gradients.
//
//   loss.backward();
//   optim::synchronize_tp_replica_gradients({&model}, mesh);     // COLLECTIVE over mesh's dim tp
//   optim::scale_grads_and_clip_grad_norm(1.0, {&model}, ...);
//
// The function is for models that mix plain tensors and DTensors. If all parameters are DTensors, their placements
// already define the reductions, and the function changes gradients only by rounding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::optim {

struct TpReplicaOptions {
  std::string tp_axis_name = "tp";
  // Modules whose gradients are summed, or not reduced, as if nn::GradientMarks::tp_replicas were kSum or kSkip. If
  // several modules enclose a parameter, the nearest one decides.
  std::vector<const nn::Module*> sum = {};
  std::vector<const nn::Module*> skip = {};
  // Largest size of one all-reduce, in bytes; a larger gradient is all-reduced alone.
  int64_t bucket_bytes = int64_t{256} << 20;
};
// Replaces the gradient of each trainable parameter by its mean over the ranks along tp_axis_name, or by the sum where
// GradientMarks::tp_replicas of its module is kSum or TpReplicaOptions::sum lists the module. Included are plain
// parameters, and DTensors that are Replicate on all dims along which those ranks differ. Excluded are experts that
// only one rank holds (GradientMarks::ep_local_experts, is_te_expert_parameter), parameters with a divisor of their own
// (GradientMarks::grad_divisors), modules whose tp_replicas is kSkip or that TpReplicaOptions::skip lists, and
// gradients that are Partial over those ranks. bfloat16 and float16 are reduced in float32. Call it once per step,
// because a sum changes when it is summed again.
//
// Does nothing for a null mesh, a mesh without that dim, or a dim of one rank. COLLECTIVE over the dim. Errors kShape,
// the same on all ranks and before any gradient changes: a gradient that some ranks lack or that differs in shape,
// dtype or placements; a sparse gradient; a parameter that two modules share and reduce differently.
void synchronize_tp_replica_gradients(const std::vector<nn::Module*>& model_parts, const MeshPtr& device_mesh,
                                      const TpReplicaOptions& options = {});

}  // namespace tessera::optim
