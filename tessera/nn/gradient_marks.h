// Marks on a module that say how the gradients of its parameters are scaled, clipped and synchronised.
//
//   struct Experts : nn::Callable<Experts>, nn::GradientMarks {
//     Experts() { ep_local_experts = true; ... }
//   };
//
// A module derives from GradientMarks; the marks hold for all parameters at or below the module. They correspond to
// NeMo AutoModel's attributes of modules and parameters, whose names are given at each member.
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
  // The parameters are this rank's own experts and differ from those of the other ranks of the expert-parallel dim
  // (_nemo_ep_local_expert_params). Not needed for a DTensor whose mesh has that dim.
  bool ep_local_experts = false;
  // The experts process tokens that all ranks of tensor parallelism hold (_nemo_moe_tp_requires_replica_sync).
  bool moe_tp_replica_sync = false;
  // How gradients of tensor-parallel replicas are combined. Unset: the mark of the enclosing module, finally kMean.
  std::optional<ReplicaReduction> tp_replicas = std::nullopt;
  // Divisors of the gradients of own parameters, by name; they replace the ratio of experts
  // (_nemo_model_owned_grad_divisor).
  std::map<std::string, double> grad_divisors = {};
};

// The marks of a module; null where it has none.
inline const GradientMarks* gradient_marks(const Module& module) { return dynamic_cast<const GradientMarks*>(&module); }

}  // namespace tessera::nn
