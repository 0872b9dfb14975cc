// Marks on a module that say how the gradients of its parameters are scaled, clipped and synchronised.
//
//   struct Experts : nn::Callable<Experts>, nn::GradientMarks {
//     Experts() { ep_local_experts = true; ... }
//   };
//
// A module derives from GradientMarks. The marks apply to all parameters at or below the module. Each corresponds to an
// attribute of modules or parameters in NeMo AutoModel, whose name is given at the member.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "tessera/nn/module.h"

namespace tessera::nn {

enum class ReplicaReduction {
  kMean,  // every rank has the whole gradient: take the mean
  kSum,   // every rank has a part of the gradient (norms between layers with sharded heads): take the sum
  kSkip,  // not replicas: the ranks' values may differ
};

struct GradientMarks {
  virtual ~GradientMarks() = default;
  // The parameters are experts that only this rank of the expert-parallel mesh dim has (_nemo_ep_local_expert_params).
  // A parameter that is a DTensor on a mesh with that dim does not need this mark.
  bool ep_local_experts = false;
  // All tensor-parallel ranks send the same tokens to the experts, so optim::get_expert_tp_replication_factor() returns
  // the tensor-parallel size (_nemo_moe_tp_requires_replica_sync).
  bool moe_tp_replica_sync = false;
  // How gradients of parameters that are replicated over tensor-parallel ranks are reduced. Unset: as the nearest
  // enclosing module with this mark says; kMean if no enclosing module has it.
  std::optional<ReplicaReduction> tp_replicas = std::nullopt;
  // Divisors for the gradients of the module's own parameters, by parameter name. They replace the divisor that
  // optim::scale_grads_and_clip_grad_norm() computes for experts (_nemo_model_owned_grad_divisor).
  std::map<std::string, double> grad_divisors = {};
};

// Returns the GradientMarks of a module; null if the module does not derive from GradientMarks.
inline const GradientMarks* gradient_marks(const Module& module) { return dynamic_cast<const GradientMarks*>(&module); }

}  // namespace tessera::nn
