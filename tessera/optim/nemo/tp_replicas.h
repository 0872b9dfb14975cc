// Gradients of parameters that every rank of tensor parallelism has a copy of, made one. Semantics of NeMo AutoModel's
// synchronize_tp_replica_gradients.
//
//   loss.backward();
//   optim::synchronize_tp_replica_gradients({&model}, mesh);     // COLLECTIVE over mesh's dim tp
//   optim::scale_grads_and_clip_grad_norm(1.0, {&model}, ...);
//
// For models whose layers compute on plain tensors beside sharded ones; where all are DTensors, their placements say
// what is to be added up, and this changes nothing but rounding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::optim {

struct TpReplicaOptions {
  std::string tp_axis_name = "tp";
  // Modules, of any type, whose gradients are added up or left alone, as nn::GradientMarks::tp_replicas says of those
  // that have marks. What is nearest to a parameter counts.
  std::vector<const nn::Module*> sum = {};
  std::vector<const nn::Module*> skip = {};
  int64_t bucket_bytes = int64_t{256} << 20;  // that travel together at most; a larger gradient alone
};
// Replaces the gradient of each trainable parameter by its mean over the ranks along tp_axis_name, or by the sum where
// the module is marked so. Taken are plain parameters and DTensors that are Replicate on all dims along which those
// ranks differ; left out are experts of one rank (GradientMarks::ep_local_experts, is_te_expert_parameter), parameters
// with a divisor of their own, skipped modules, and gradients that are pending sums over those ranks. bfloat16 and
// float16 travel in float32. To be called once a step: a sum is not the same when summed again.
// A null mesh, one without that dim, or of one rank there: nothing. COLLECTIVE over the dim. Errors kShape, alike on
// all ranks and before any gradient is changed: a gradient that some ranks lack or that differs in shape, dtype or
// placements; one that is sparse; a parameter that two modules share and reduce unlike.
void synchronize_tp_replica_gradients(const std::vector<nn::Module*>& model_parts, const MeshPtr& device_mesh,
                                      const TpReplicaOptions& options = {});

}  // namespace tessera::optim
