// What a module says of the gradients of its parameters, to those who scale, clip and synchronise them.
//
//   struct Experts : nn::Callable<Experts>, nn::GradientMarks {
//     Experts() { ep_local_experts = true; ... }
//   };
//
// A module derives from it; marks hold for all parameters at or below the module. They are NeMo AutoModel's attributes
// of modules and parameters, named with each.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

enum class ReplicaReduction {
  kMean,  // every rank has the whole gradient
  kSum,   // every rank has a part of it: norms between layers whose heads are sharded
  kSkip,  // replicas in name only
};

struct GradientMarks {
  virtual ~GradientMarks() = default;
  // Parameters are this rank's own experts, others than those of the ranks along the expert dim
  // (_nemo_ep_local_expert_params). A DTensor whose mesh has that dim says so itself.
  bool ep_local_experts = false;
  // Experts work on tokens that all ranks of tensor parallelism have (_nemo_moe_tp_requires_replica_sync).
  bool moe_tp_replica_sync = false;
  // How gradients of replicas over tensor parallelism become one; unset: as the module above, at last the mean.
  std::optional<ReplicaReduction> tp_replicas = std::nullopt;
  // Of own parameters by name: what the module wants their gradients divided by, in place of the ratio of experts
  // (_nemo_model_owned_grad_divisor).
  std::map<std::string, double> grad_divisors = {};
};

// Null where a module has none.
inline const GradientMarks* gradient_marks(const Module& module) { return dynamic_cast<const GradientMarks*>(&module); }

}  // namespace tessera::nn
